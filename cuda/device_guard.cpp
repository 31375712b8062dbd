// SPDX-License-Identifier: Apache-2.0
#include "device_guard.hpp"

#include <map>
#include <mutex>

#include "driver.hpp"
#include "error.hpp"

namespace paceline::cuda {
namespace {

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static auto* const contexts = new std::map<int, CUcontext>;  // never destroyed: CUDA must not be used at exit
  const std::lock_guard lock(mutex);
  CUcontext& context = (*contexts)[device];
  if (context != nullptr) return context;
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "finding the device", device);
  CUcontext retained = nullptr;
  check(driver().primary_context_retain(&retained, handle), "making its context", device);
  return context = retained;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  check(driver().context_push(primary_context(device)), "making the device current", device);
  // The context must be current, here and below. On a thread without a context this call would make and keep GPU 0's.
  if (cudaThreadExchangeStreamCaptureMode(&capture_before_) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

DeviceGuard::~DeviceGuard() {
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_before_));
  CUcontext popped = nullptr;
  static_cast<void>(driver().context_pop(&popped));
}

}  // namespace paceline::cuda

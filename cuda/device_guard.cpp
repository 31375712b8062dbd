// SPDX-License-Identifier: Apache-2.0
#include "device_guard.hpp"

#include <fmt/format.h>

#include <map>
#include <mutex>

#include <paceline/error.hpp>

#include "driver.hpp"

namespace paceline::cuda {
namespace {

CUcontext primary_context(int device) {
  static std::mutex mutex;
  static auto* const contexts = new std::map<int, CUcontext>;  // never destroyed: CUDA must not be used at exit
  const std::lock_guard lock(mutex);
  CUcontext& context = (*contexts)[device];
  if (context != nullptr) return context;
  CUdevice handle = 0;
  CUresult result = driver().device_get(&handle, device);
  if (result == CUDA_SUCCESS) result = driver().primary_context_retain(&context, handle);
  if (result != CUDA_SUCCESS) {
    context = nullptr;
    throw Error(fmt::format("cuda:{}: its context cannot be had (driver error {})", device, static_cast<int>(result)),
                fmt::format("cuda:{}", device));
  }
  return context;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  const CUresult result = driver().context_push(primary_context(device));
  if (result != CUDA_SUCCESS) {
    throw Error(fmt::format("cuda:{}: cannot be made current (driver error {})", device, static_cast<int>(result)),
                fmt::format("cuda:{}", device));
  }
  // The context must be current, here and below. On a thread without a context this call would make and keep GPU 0's.
  if (cudaThreadExchangeStreamCaptureMode(&capture_before_) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

DeviceGuard::~DeviceGuard() {
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_before_));
  CUcontext popped = nullptr;
  static_cast<void>(driver().context_pop(&popped));
}

}  // namespace paceline::cuda

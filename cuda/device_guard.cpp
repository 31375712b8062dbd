// SPDX-License-Identifier: Apache-2.0
#include "device_guard.hpp"

#include <array>
#include <cstddef>
#include <map>
#include <mutex>

#include "driver.hpp"
#include "error.hpp"

namespace paceline::cuda {
namespace {

// The contexts that this thread has used. Every poll of an event needs one, so finding it must not take a lock. An
// array needs no destructor, so it still works when the thread ends.
constexpr std::size_t kKnownContexts = 32;
thread_local std::array<CUcontext, kKnownContexts> known_contexts{};

CUcontext find_primary_context(int device) {
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

CUcontext primary_context(int device) {
  const auto index = static_cast<std::size_t>(device);
  if (index >= kKnownContexts) return find_primary_context(device);
  CUcontext& known = known_contexts[index];
  return known != nullptr ? known : known = find_primary_context(device);
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

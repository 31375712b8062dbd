// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace paceline::cuda {

/// Makes a device current for the calling thread. The destructor restores the state before, with or without a context.
/// In between, the thread's calls do not break a stream capture of another thread (cudaStreamCaptureModeRelaxed).
///
/// Pushes the device's primary context, which the runtime and PyTorch use. cudaSetDevice would replace the caller's own
/// context for good. The primary context is kept for the rest of the process, because others use it too.
class DeviceGuard {
 public:
  /// @throws Unavailable without a driver, Error if the device refuses.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  cudaStreamCaptureMode capture_before_ = cudaStreamCaptureModeRelaxed;
};

/// Calls `destroy` with the device current. Does nothing when the driver is shutting down, which frees everything.
template <class Destroy>
void destroy_on(int device, Destroy destroy) noexcept {
  try {
    const DeviceGuard guard(device);
    static_cast<void>(destroy());
  } catch (...) {
  }
}

}  // namespace paceline::cuda

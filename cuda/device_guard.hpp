// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace paceline::cuda {

/// Lets this library's calls be harmless to a stream capture of another thread (cudaStreamCaptureModeRelaxed), as long
/// as it lives. Never throws.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;
};

/// Makes a device current for the calling thread, and afterwards what was current before: no context if there was none.
///
/// Pushes the device's primary context, the one that the runtime and PyTorch use. cudaSetDevice would replace the
/// caller's own context for good. The primary context is retained for the rest of the process: others use it too.
class DeviceGuard {
 public:
  /// @throws Unavailable without a driver, Error if the device refuses.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  RelaxedCapture relaxed_;
};

}  // namespace paceline::cuda

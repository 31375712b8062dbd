// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace paceline::cuda {

/// Makes a device current for the calling thread, and afterwards what was current before: no context if there was none.
/// Meanwhile the thread's calls are harmless to a stream capture of another thread (cudaStreamCaptureModeRelaxed).
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
  cudaStreamCaptureMode capture_before_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace paceline::cuda

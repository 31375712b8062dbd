// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "machine.hpp"

namespace fake {

/// Returns `error` and keeps it for cudaGetLastError() on this thread.
cudaError_t fail(cudaError_t error);

/// The stream behind a handle. A destroyed stream ends the program, and so does null: the legacy default stream is
/// cudaStreamLegacy.
[[nodiscard]] Stream* as_stream(cudaStream_t stream);

/// Enqueues work, or returns the device's sticky error.
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body);

/// As after the start of a process.
void forget_loaded_kernels();

}  // namespace fake

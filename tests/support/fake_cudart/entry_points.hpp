// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "machine.hpp"

namespace fake {

/// `error`, which is also what cudaGetLastError() tells this thread.
cudaError_t fail(cudaError_t error);

/// The stream behind a handle of the program's. One that is none, or that was not said in full, ends the program.
[[nodiscard]] Stream* as_stream(cudaStream_t stream);

/// Work of a stream whose device is well.
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body);

}  // namespace fake

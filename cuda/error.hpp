// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <source_location>
#include <string>

namespace paceline::cuda {

/// "out of memory (cudaErrorMemoryAllocation)"
[[nodiscard]] std::string text_of(cudaError_t error);

/// Throws OutOfMemory, DeviceLost for sticky errors, or Error for other failures. `doing` completes "cuda:0: ...
/// failed". Clears the runtime's last error, so that no other check finds it.
void check(cudaError_t error, const char* doing, int device,
           std::source_location where = std::source_location::current());

/// The same for calls of the driver, which numbers its errors as the runtime does.
void check(CUresult result, const char* doing, int device,
           std::source_location where = std::source_location::current());

/// Throws DeviceLost if the device has failed, perhaps at earlier work.
void check_alive(int device);

/// The value of the attribute, or `otherwise` if the driver does not know the attribute.
[[nodiscard]] int attribute(cudaDeviceAttr which, int ordinal, int otherwise) noexcept;

}  // namespace paceline::cuda

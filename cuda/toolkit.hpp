// SPDX-License-Identifier: Apache-2.0
//
// Where the toolkits that this builds with differ, 12.5 to 13: here and nowhere else.
#pragma once

#include <cuda_runtime_api.h>

namespace paceline::cuda {

/// Sticky errors that toolkits learned of later; the driver may be newer than the header.
inline bool is_later_sticky(cudaError_t error) noexcept {
  constexpr int contained = 226;           // cudaErrorContained
  constexpr int tensor_memory_leak = 721;  // cudaErrorTensorMemoryLeak
  return static_cast<int>(error) == contained || static_cast<int>(error) == tensor_memory_leak;
}
#if CUDART_VERSION >= 13000
static_assert(static_cast<int>(cudaErrorContained) == 226 && static_cast<int>(cudaErrorTensorMemoryLeak) == 721);
#endif

}  // namespace paceline::cuda

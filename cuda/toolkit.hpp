// SPDX-License-Identifier: Apache-2.0
//
// Where the toolkits that this builds with differ, 12.4 to 13: here and nowhere else.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace paceline::cuda {

/// The driver's function `name` with the meaning it had in CUDA `version`; null if it has none such.
inline cudaError_t find_driver_function(const char* name, void** function, unsigned int version,
                                        cudaDriverEntryPointQueryResult* result) {
#if CUDART_VERSION >= 12050
  return cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, result);
#else
  // This runtime finds the functions of its own version only. One of them is the driver's own way to find all.
  void* found = nullptr;
  const cudaError_t error = cudaGetDriverEntryPoint("cuGetProcAddress", &found, cudaEnableDefault, result);
  if (error != cudaSuccess || found == nullptr) return error;
  const auto get_address = reinterpret_cast<decltype(&cuGetProcAddress)>(found);
  const bool there =
      get_address(name, function, static_cast<int>(version), CU_GET_PROC_ADDRESS_DEFAULT, nullptr) == CUDA_SUCCESS &&
      *function != nullptr;
  *result = there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
#endif
}

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

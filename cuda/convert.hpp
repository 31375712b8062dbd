// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace paceline::cuda {

/// The arguments of the kernels, by value. Both pointers are aligned to their elements.
struct ConversionArguments {
  void* to;
  const void* from;
  std::size_t count;  ///< elements
};

// From float32 to a half type, rounded to nearest even, and back. Stream::convert() has the contract. They are not
// templates, because nvcc gives kernel templates no name that another translation unit can use.
__global__ void paceline_to_float16(ConversionArguments arguments);
__global__ void paceline_to_bfloat16(ConversionArguments arguments);
__global__ void paceline_from_float16(ConversionArguments arguments);
__global__ void paceline_from_bfloat16(ConversionArguments arguments);

}  // namespace paceline::cuda

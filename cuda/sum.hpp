// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace paceline::cuda {

constexpr int kMaxSumInputs = 128;  // a kernel's arguments are limited to 4 KiB

/// What the kernels get, by value.
struct SumArguments {
  const void* inputs[kMaxSumInputs];
  int input_count;
  void* output;
  std::size_t count;  ///< elements
  double scale;
};

// output[i] = scale * (inputs[0][i] + inputs[1][i] + ...), in this order, in float32 (float64: in float64), rounded
// once. One kernel for each type of elements. They are no templates: nvcc gives kernel templates no name that another
// translation unit could refer to.
__global__ void paceline_sum_float32(SumArguments arguments);
__global__ void paceline_sum_float64(SumArguments arguments);
__global__ void paceline_sum_float16(SumArguments arguments);
__global__ void paceline_sum_bfloat16(SumArguments arguments);

}  // namespace paceline::cuda

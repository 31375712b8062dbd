// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include <paceline/runtime/reduce_op.hpp>

namespace paceline::cuda {

constexpr int kMaxReductionInputs = 128;  // a kernel's arguments are limited to 4 KiB

/// What the kernels get, by value.
struct ReductionArguments {
  const void* inputs[kMaxReductionInputs];
  int input_count;
  ReduceOp op;
  void* output;
  std::size_t count;     ///< elements
  double scale;          ///< of a sum of floating-point elements
  std::int64_t divisor;  ///< of a mean
};

// DeviceReduction (paceline/runtime/async_device.hpp), one kernel for each type of elements. They are no templates:
// nvcc gives kernel templates no name that another translation unit could refer to.
__global__ void paceline_reduce_float32(ReductionArguments arguments);
__global__ void paceline_reduce_float64(ReductionArguments arguments);
__global__ void paceline_reduce_float16(ReductionArguments arguments);
__global__ void paceline_reduce_bfloat16(ReductionArguments arguments);
__global__ void paceline_reduce_int32(ReductionArguments arguments);
__global__ void paceline_reduce_int64(ReductionArguments arguments);

}  // namespace paceline::cuda

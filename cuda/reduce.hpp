// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include <paceline/runtime/reduce_op.hpp>

namespace paceline::cuda {

constexpr int kMaxReductionInputs = 128;  // a kernel's arguments are limited to 4 KiB

constexpr int kReductionBlock = 256;  // threads

/// The arguments of the kernels, by value.
struct ReductionArguments {
  const void* inputs[kMaxReductionInputs];
  int input_count;
  ReduceOp op;
  void* output;
  std::size_t count;     ///< elements
  double scale;          ///< for a sum of floating-point elements
  std::int64_t divisor;  ///< for a mean
};

// One kernel per element type. DeviceReduction (paceline/runtime/async_device.hpp) has their contract. They are not
// templates, because nvcc gives kernel templates no name that another translation unit can use.
__global__ void paceline_reduce_float32(ReductionArguments arguments);
__global__ void paceline_reduce_float64(ReductionArguments arguments);
__global__ void paceline_reduce_float16(ReductionArguments arguments);
__global__ void paceline_reduce_bfloat16(ReductionArguments arguments);
__global__ void paceline_reduce_int32(ReductionArguments arguments);
__global__ void paceline_reduce_int64(ReductionArguments arguments);

}  // namespace paceline::cuda

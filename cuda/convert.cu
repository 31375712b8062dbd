// SPDX-License-Identifier: Apache-2.0
//
// Converts between float32 and the half types, four elements at a time: 16 bytes of float32 and 8 bytes of the other.
#include "convert.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "reduce.hpp"

namespace paceline::cuda {
namespace {

__device__ void convert_one(__half& to, float from) { to = __float2half_rn(from); }
__device__ void convert_one(__nv_bfloat16& to, float from) { to = __float2bfloat16_rn(from); }
__device__ void convert_one(float& to, __half from) { to = __half2float(from); }
__device__ void convert_one(float& to, __nv_bfloat16 from) { to = __bfloat162float(from); }

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T values[4];
};

template <class To, class From>
__device__ void convert(const ConversionArguments& arguments) {
  const std::size_t thread = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  const auto fits = [](const void* data, std::size_t unit) {
    return reinterpret_cast<std::uintptr_t>(data) % unit == 0;
  };
  std::size_t fours = 0;
  if (fits(arguments.to, sizeof(Four<To>)) && fits(arguments.from, sizeof(Four<From>))) fours = arguments.count / 4;
  for (std::size_t i = thread; i < fours; i += threads) {
    const Four<From> from = static_cast<const Four<From>*>(arguments.from)[i];
    Four<To> to;
#pragma unroll
    for (int j = 0; j < 4; ++j) convert_one(to.values[j], from.values[j]);
    static_cast<Four<To>*>(arguments.to)[i] = to;
  }
  for (std::size_t i = 4 * fours + thread; i < arguments.count; i += threads) {
    convert_one(static_cast<To*>(arguments.to)[i], static_cast<const From*>(arguments.from)[i]);
  }
}

}  // namespace

__global__ void __launch_bounds__(kReductionBlock) paceline_to_float16(ConversionArguments arguments) {
  convert<__half, float>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_to_bfloat16(ConversionArguments arguments) {
  convert<__nv_bfloat16, float>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_from_float16(ConversionArguments arguments) {
  convert<float, __half>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_from_bfloat16(ConversionArguments arguments) {
  convert<float, __nv_bfloat16>(arguments);
}

}  // namespace paceline::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The sum of the buffers of one GPU's partitions. Bound by memory: k inputs are read once, one output is written, with
// loads of 16 bytes wherever the pointers allow it.
#include "sum.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace paceline::cuda {
namespace {

template <class T>
struct Arithmetic {
  using Sum = float;
};
template <>
struct Arithmetic<double> {
  using Sum = double;
};

__device__ float load(float value) { return value; }
__device__ double load(double value) { return value; }
__device__ float load(__half value) { return __half2float(value); }
__device__ float load(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T store(typename Arithmetic<T>::Sum value);
template <>
__device__ float store<float>(float value) {
  return value;
}
template <>
__device__ double store<double>(double value) {
  return value;
}
template <>
__device__ __half store<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 store<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// Additions must not be fused with the multiplication by the scale: the host sums first and scales then.
__device__ float scaled(float sum, double scale) {
  return scale == 1.0 ? sum : __fmul_rn(sum, static_cast<float>(scale));
}
__device__ double scaled(double sum, double scale) { return scale == 1.0 ? sum : __dmul_rn(sum, scale); }

template <class T>
__device__ void sum_one(const SumArguments& arguments, std::size_t i) {
  typename Arithmetic<T>::Sum sum = load(static_cast<const T*>(arguments.inputs[0])[i]);
  for (int k = 1; k < arguments.input_count; ++k) sum += load(static_cast<const T*>(arguments.inputs[k])[i]);
  static_cast<T*>(arguments.output)[i] = store<T>(scaled(sum, arguments.scale));
}

/// `begin` is the first element whose address is a multiple of 16 bytes in every buffer.
template <class T>
__device__ void sum_pack(const SumArguments& arguments, std::size_t begin, std::size_t pack) {
  constexpr int size = Pack<T>::kSize;
  const auto at = [&](const void* buffer) {
    return reinterpret_cast<const Pack<T>*>(static_cast<const T*>(buffer) + begin) + pack;
  };
  typename Arithmetic<T>::Sum sums[size];
  const Pack<T> first = *at(arguments.inputs[0]);
#pragma unroll
  for (int j = 0; j < size; ++j) sums[j] = load(first.values[j]);
  for (int k = 1; k < arguments.input_count; ++k) {
    const Pack<T> next = *at(arguments.inputs[k]);
#pragma unroll
    for (int j = 0; j < size; ++j) sums[j] += load(next.values[j]);
  }
  Pack<T> result;
#pragma unroll
  for (int j = 0; j < size; ++j) result.values[j] = store<T>(scaled(sums[j], arguments.scale));
  *(reinterpret_cast<Pack<T>*>(static_cast<T*>(arguments.output) + begin) + pack) = result;
}

template <class T>
__device__ void sum(const SumArguments& arguments) {
  const std::size_t thread = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  const auto offset_of = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16; };
  const std::uintptr_t offset = offset_of(arguments.output);
  bool alike = offset % sizeof(T) == 0;
  for (int k = 0; k < arguments.input_count; ++k) alike = alike && offset_of(arguments.inputs[k]) == offset;
  if (!alike) {
    for (std::size_t i = thread; i < arguments.count; i += threads) sum_one<T>(arguments, i);
    return;
  }
  std::size_t begin = offset == 0 ? 0 : (16 - offset) / sizeof(T);
  if (begin > arguments.count) begin = arguments.count;
  const std::size_t packs = (arguments.count - begin) / Pack<T>::kSize;
  const std::size_t end = begin + packs * Pack<T>::kSize;
  for (std::size_t i = thread; i < packs; i += threads) sum_pack<T>(arguments, begin, i);
  if (thread < begin) sum_one<T>(arguments, thread);
  if (thread < arguments.count - end) sum_one<T>(arguments, end + thread);
}

}  // namespace

__global__ void paceline_sum_float32(SumArguments arguments) { sum<float>(arguments); }
__global__ void paceline_sum_float64(SumArguments arguments) { sum<double>(arguments); }
__global__ void paceline_sum_float16(SumArguments arguments) { sum<__half>(arguments); }
__global__ void paceline_sum_bfloat16(SumArguments arguments) { sum<__nv_bfloat16>(arguments); }

}  // namespace paceline::cuda

// SPDX-License-Identifier: Apache-2.0
//
// Reduces the buffers of one GPU's partitions. The kernels are bound by memory: they read k inputs once and write one
// output, with loads of 16 bytes where the pointers allow it, two per thread and input at a time.
#include "reduce.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace paceline::cuda {
namespace {

// --- the types: as stored, and as computed ---

template <class T>
__device__ T widen(T value) {
  return value;
}
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
using Value = decltype(widen(T()));

template <class T>
__device__ T narrow(Value<T> value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// --- the operators ---

struct Sum {
  template <class V>
  static __device__ V combine(V a, V b) {
    if constexpr (std::is_integral_v<V>) {
      using Unsigned = std::make_unsigned_t<V>;  // wraps; signed overflow is undefined
      return static_cast<V>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      return a + b;
    }
  }
  /// Scales or divides after the sum, without fusing that with the last addition. The host does the same.
  static __device__ float finish(float sum, const ReductionArguments& arguments) {
    if (arguments.op == ReduceOp::mean) return __fdiv_rn(sum, static_cast<float>(arguments.divisor));
    return arguments.scale == 1.0 ? sum : __fmul_rn(sum, static_cast<float>(arguments.scale));
  }
  static __device__ double finish(double sum, const ReductionArguments& arguments) {
    if (arguments.op == ReduceOp::mean) return __ddiv_rn(sum, static_cast<double>(arguments.divisor));
    return arguments.scale == 1.0 ? sum : __dmul_rn(sum, arguments.scale);
  }
  template <class V>
  static __device__ V finish(V sum, const ReductionArguments& arguments) {
    return arguments.op == ReduceOp::mean ? sum / static_cast<V>(arguments.divisor) : sum;
  }
};

// A NaN wins over numbers, and a later NaN over an earlier one. Of equal values the first stays.
struct Min {
  template <class V>
  static __device__ V combine(V a, V b) {
    return b < a || b != b ? b : a;
  }
  template <class V>
  static __device__ V finish(V value, const ReductionArguments&) {
    return value;
  }
};

struct Max : Min {
  template <class V>
  static __device__ V combine(V a, V b) {
    return b > a || b != b ? b : a;
  }
};

// --- one element, or 16 bytes of them ---

__device__ std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

/// Copies byte by byte if an address is not aligned to the type.
template <class T>
__device__ void copy_element(void* to, const void* from) {
  if ((address(to) | address(from)) % alignof(T) == 0) {
    *static_cast<T*>(to) = *static_cast<const T*>(from);
    return;
  }
  for (std::size_t j = 0; j < sizeof(T); ++j) static_cast<char*>(to)[j] = static_cast<const char*>(from)[j];
}

template <class T, class Op>
__device__ void reduce_one(const ReductionArguments& arguments, std::size_t i) {
  const auto load = [&](int k) {
    T value;
    copy_element<T>(&value, static_cast<const char*>(arguments.inputs[k]) + i * sizeof(T));
    return widen(value);
  };
  Value<T> value = load(0);
  for (int k = 1; k < arguments.input_count; ++k) value = Op::combine(value, load(k));
  const T result = narrow<T>(Op::finish(value, arguments));
  copy_element<T>(static_cast<char*>(arguments.output) + i * sizeof(T), &result);
}

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

/// Reduces kPacks packs that lie `stride` apart. All loads of one input come before their use, so they are under way at
/// the same time. `begin` is the first element whose address is a multiple of 16 bytes in every buffer.
template <int kPacks, class T, class Op>
__device__ void reduce_packs(const ReductionArguments& arguments, std::size_t begin, std::size_t pack,
                             std::size_t stride) {
  constexpr int size = Pack<T>::kSize;
  const auto load = [&](Pack<T>(&packs)[kPacks], int k) {
    const auto* const from =
        reinterpret_cast<const Pack<T>*>(static_cast<const T*>(arguments.inputs[k]) + begin) + pack;
#pragma unroll
    for (int n = 0; n < kPacks; ++n) packs[n] = from[static_cast<std::size_t>(n) * stride];
  };
  Pack<T> packs[kPacks];
  Value<T> values[kPacks][size];
  load(packs, 0);
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
#pragma unroll
    for (int j = 0; j < size; ++j) values[n][j] = widen(packs[n].values[j]);
  }
  for (int k = 1; k < arguments.input_count; ++k) {
    load(packs, k);
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
#pragma unroll
      for (int j = 0; j < size; ++j) values[n][j] = Op::combine(values[n][j], widen(packs[n].values[j]));
    }
  }
  auto* const to = reinterpret_cast<Pack<T>*>(static_cast<T*>(arguments.output) + begin) + pack;
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
#pragma unroll
    for (int j = 0; j < size; ++j) packs[n].values[j] = narrow<T>(Op::finish(values[n][j], arguments));
    to[static_cast<std::size_t>(n) * stride] = packs[n];
  }
}

template <class T, class Op>
__device__ void reduce_with(const ReductionArguments& arguments) {
  const std::size_t thread = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  const std::uintptr_t offset = address(arguments.output) % 16;
  bool alike = offset % sizeof(T) == 0;
  for (int k = 0; k < arguments.input_count; ++k) alike = alike && address(arguments.inputs[k]) % 16 == offset;
  if (!alike) {
    for (std::size_t i = thread; i < arguments.count; i += threads) reduce_one<T, Op>(arguments, i);
    return;
  }
  std::size_t begin = offset == 0 ? 0 : (16 - offset) / sizeof(T);
  if (begin > arguments.count) begin = arguments.count;
  const std::size_t packs = (arguments.count - begin) / Pack<T>::kSize;
  const std::size_t end = begin + packs * Pack<T>::kSize;
  std::size_t i = thread;
  for (; i + threads < packs; i += 2 * threads) reduce_packs<2, T, Op>(arguments, begin, i, threads);
  if (i < packs) reduce_packs<1, T, Op>(arguments, begin, i, threads);
  if (thread < begin) reduce_one<T, Op>(arguments, thread);
  if (thread < arguments.count - end) reduce_one<T, Op>(arguments, end + thread);
}

template <class T>
__device__ void reduce(const ReductionArguments& arguments) {
  if (arguments.op == ReduceOp::min) {
    reduce_with<T, Min>(arguments);
  } else if (arguments.op == ReduceOp::max) {
    reduce_with<T, Max>(arguments);
  } else {
    reduce_with<T, Sum>(arguments);
  }
}

}  // namespace

__global__ void __launch_bounds__(kReductionBlock) paceline_reduce_float32(ReductionArguments arguments) {
  reduce<float>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_reduce_float64(ReductionArguments arguments) {
  reduce<double>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_reduce_float16(ReductionArguments arguments) {
  reduce<__half>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_reduce_bfloat16(ReductionArguments arguments) {
  reduce<__nv_bfloat16>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_reduce_int32(ReductionArguments arguments) {
  reduce<std::int32_t>(arguments);
}
__global__ void __launch_bounds__(kReductionBlock) paceline_reduce_int64(ReductionArguments arguments) {
  reduce<std::int64_t>(arguments);
}

}  // namespace paceline::cuda

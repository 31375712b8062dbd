// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <paceline/comm/reduce.hpp>

#include "../cpp/comm/reference.hpp"
#include "sum.hpp"

namespace paceline::cuda {

/// The kernels of sum.hpp on the host: what runs in their place on the fake runtime, and what a GPU's result is
/// compared with, to the bit.
inline void sum_twin(const SumArguments& arguments, DType dtype) {
  const std::span<const void* const> inputs(arguments.inputs, static_cast<std::size_t>(arguments.input_count));
  if (arguments.scale == 1.0) {
    reduce_block(inputs, arguments.output, arguments.count, dtype, ReduceOp::sum);
    return;
  }
  // Scaled before it is rounded to a half type, which reduce_block cannot do.
  const auto sum_as = [&]<class Sum>(Sum, auto load, auto store) {
    for (std::size_t i = 0; i < arguments.count; ++i) {
      Sum sum = load(inputs[0], i);
      for (const void* input : inputs.subspan(1)) sum += load(input, i);
      store(i, sum * static_cast<Sum>(arguments.scale));
    }
  };
  const auto plain = [&]<class T>(T zero) {
    sum_as(
        zero, [](const void* data, std::size_t i) { return reference::element<T>(data, i); },
        [&](std::size_t i, T value) {
          std::memcpy(static_cast<char*>(arguments.output) + i * sizeof(T), &value, sizeof(T));
        });
  };
  const auto half = [&](int exponent_bits, int mantissa_bits) {
    sum_as(
        0.0F,
        [&](const void* data, std::size_t i) {
          return reference::half_value(reference::element<std::uint16_t>(data, i), exponent_bits, mantissa_bits);
        },
        [&](std::size_t i, float value) {
          const std::uint16_t bits = reference::half_bits(value, exponent_bits, mantissa_bits);
          std::memcpy(static_cast<char*>(arguments.output) + i * sizeof(bits), &bits, sizeof(bits));
        });
  };
  if (dtype == DType::float32) plain(0.0F);
  if (dtype == DType::float64) plain(0.0);
  if (dtype == DType::float16) half(5, 10);
  if (dtype == DType::bfloat16) half(8, 7);
}

}  // namespace paceline::cuda

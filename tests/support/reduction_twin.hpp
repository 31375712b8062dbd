// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <paceline/comm/reduce.hpp>

#include "../cpp/comm/reference.hpp"
#include "convert.hpp"
#include "reduce.hpp"

namespace paceline::cuda {

/// The kernels' last operation on a finished sum that reduce_block cannot do: a scale, or a mean of another number of
/// values than the inputs.
template <class Value>
Value finished(Value sum, const ReductionArguments& arguments) {
  if (arguments.op == ReduceOp::mean) return sum / static_cast<Value>(arguments.divisor);
  if constexpr (std::is_floating_point_v<Value>) return sum * static_cast<Value>(arguments.scale);
  return sum;
}

/// The kernels of reduce.hpp as host functions. They run in the kernels' place on the fake runtime, and a GPU's result
/// must equal theirs to the bit.
inline void reduction_twin(const ReductionArguments& arguments, DType dtype) {
  const std::span<const void* const> inputs(arguments.inputs, static_cast<std::size_t>(arguments.input_count));
  const bool sums = arguments.op == ReduceOp::sum;
  if (sums ? arguments.scale == 1.0 : arguments.op != ReduceOp::mean || arguments.divisor == arguments.input_count) {
    reduce_block(inputs, arguments.output, arguments.count, dtype, arguments.op);
    return;
  }
  const auto plain = [&]<class Number, class Unsigned>(Number, Unsigned) {
    for (std::size_t i = 0; i < arguments.count; ++i) {
      std::vector<Number> values;
      for (const void* input : inputs) values.push_back(reference::element<Number>(input, i));
      const Number result = finished(reference::reduce_one<Number, Unsigned>(values, ReduceOp::sum), arguments);
      std::memcpy(static_cast<char*>(arguments.output) + i * sizeof(result), &result, sizeof(result));
    }
  };
  const auto half = [&](int exponent_bits, int mantissa_bits) {
    for (std::size_t i = 0; i < arguments.count; ++i) {
      std::vector<float> values;
      for (const void* input : inputs) {
        const auto bits = reference::element<std::uint16_t>(input, i);
        values.push_back(reference::half_value(bits, exponent_bits, mantissa_bits));
      }
      const float result = finished(reference::reduce_one<float, float>(values, ReduceOp::sum), arguments);
      const std::uint16_t bits = reference::half_bits(result, exponent_bits, mantissa_bits);
      std::memcpy(static_cast<char*>(arguments.output) + i * sizeof(bits), &bits, sizeof(bits));
    }
  };
  if (dtype == DType::float32) plain(0.0F, 0.0F);
  if (dtype == DType::float64) plain(0.0, 0.0);
  if (dtype == DType::float16) half(5, 10);
  if (dtype == DType::bfloat16) half(8, 7);
  if (dtype == DType::int32) plain(std::int32_t{}, std::uint32_t{});
  if (dtype == DType::int64) plain(std::int64_t{}, std::uint64_t{});
}

/// The kernels of convert.hpp likewise. `narrows`: from float32 to the half type of so many bits.
inline void conversion_twin(const ConversionArguments& arguments, int exponent_bits, int mantissa_bits, bool narrows) {
  for (std::size_t i = 0; i < arguments.count; ++i) {
    if (narrows) {
      const float value = static_cast<const float*>(arguments.from)[i];
      static_cast<std::uint16_t*>(arguments.to)[i] = reference::half_bits(value, exponent_bits, mantissa_bits);
    } else {
      const std::uint16_t bits = static_cast<const std::uint16_t*>(arguments.from)[i];
      static_cast<float*>(arguments.to)[i] = reference::half_value(bits, exponent_bits, mantissa_bits);
    }
  }
}

}  // namespace paceline::cuda

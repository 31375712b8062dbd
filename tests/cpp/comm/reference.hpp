// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels must compute, written as directly as the definitions allow, without regard to speed.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>

namespace paceline::reference {

inline constexpr DType kDTypes[] = {DType::float32,  DType::float64, DType::float16,
                                    DType::bfloat16, DType::int32,   DType::int64};
inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max};

inline float half_value(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * static_cast<float>(std::ldexp(mantissa, 1 - bias - mantissa_bits));
  return sign * static_cast<float>(std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits));
}

// The nearest representable value, ties to even: nearbyint rounds to whole units of the last place.
inline std::uint16_t half_bits(float number, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto all_ones = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  const auto sign = static_cast<std::uint16_t>(std::signbit(number) ? 0x8000 : 0);
  if (std::isnan(number)) return static_cast<std::uint16_t>(sign | all_ones | (1 << (mantissa_bits - 1)));
  const double magnitude = std::fabs(static_cast<double>(number));
  if (std::isinf(magnitude)) return sign | all_ones;
  int exponent = magnitude == 0 ? 1 - bias : std::ilogb(magnitude);
  exponent = std::max(exponent, 1 - bias);
  // In units of the last place. The implicit bit adds one to the exponent field.
  const auto units = static_cast<std::int64_t>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
  const std::int64_t field = units + (static_cast<std::int64_t>(exponent - (1 - bias)) << mantissa_bits);
  return sign | static_cast<std::uint16_t>(std::min<std::int64_t>(field, all_ones));
}

template <class Number>
bool is_nan(Number number) {
  return number != number;
}

template <class Number, class Unsigned>
Number reduce_one(const std::vector<Number>& values, ReduceOp op) {
  Number result = values[0];
  for (std::size_t k = 1; k < values.size(); ++k) {
    const Number next = values[k];
    if (op == ReduceOp::sum || op == ReduceOp::mean) {
      result = static_cast<Number>(static_cast<Unsigned>(result) + static_cast<Unsigned>(next));
    } else if (is_nan(result)) {
      continue;
    } else if (is_nan(next) || (op == ReduceOp::min ? next < result : next > result)) {
      result = next;
    }
  }
  if (op == ReduceOp::mean) result = result / static_cast<Number>(values.size());
  return result;
}

template <class Number>
Number element(const void* data, std::size_t index) {
  Number number;
  std::memcpy(&number, static_cast<const char*>(data) + index * sizeof(Number), sizeof(Number));
  return number;
}

/// The bits of element `index` of the reduction, in the low bits of the result.
inline std::uint64_t reduced_bits(const std::vector<const void*>& inputs, std::size_t index, DType dtype, ReduceOp op) {
  const auto gather = [&]<class Number>(Number) {
    std::vector<Number> values;
    for (const void* input : inputs) values.push_back(element<Number>(input, index));
    return values;
  };
  const auto half = [&](int exponent_bits, int mantissa_bits) -> std::uint64_t {
    std::vector<float> values;
    for (const void* input : inputs) {
      values.push_back(half_value(element<std::uint16_t>(input, index), exponent_bits, mantissa_bits));
    }
    return half_bits(reduce_one<float, float>(values, op), exponent_bits, mantissa_bits);
  };
  switch (dtype) {
    case DType::float32:
      return std::bit_cast<std::uint32_t>(reduce_one<float, float>(gather(0.0f), op));
    case DType::float64:
      return std::bit_cast<std::uint64_t>(reduce_one<double, double>(gather(0.0), op));
    case DType::float16:
      return half(5, 10);
    case DType::bfloat16:
      return half(8, 7);
    case DType::int32:
      return static_cast<std::uint32_t>(reduce_one<std::int32_t, std::uint32_t>(gather(std::int32_t{}), op));
    case DType::int64:
      return static_cast<std::uint64_t>(reduce_one<std::int64_t, std::uint64_t>(gather(std::int64_t{}), op));
  }
  return 0;
}

inline std::uint64_t bits_of(const void* data, std::size_t index, DType dtype) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(data) + index * size_of(dtype), size_of(dtype));
  return bits;
}

inline bool is_nan_bits(std::uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return std::isnan(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    case DType::float64:
      return std::isnan(std::bit_cast<double>(bits));
    case DType::float16:
      return std::isnan(half_value(static_cast<std::uint16_t>(bits), 5, 10));
    case DType::bfloat16:
      return std::isnan(half_value(static_cast<std::uint16_t>(bits), 8, 7));
    default:
      return false;
  }
}

/// Equal to the bit, except that any NaN equals any other.
inline bool same(std::uint64_t a, std::uint64_t b, DType dtype) {
  return a == b || (is_nan_bits(a, dtype) && is_nan_bits(b, dtype));
}

/// Fills with random bits: a third any pattern (infinities, NaNs, subnormals, huge numbers), the rest numbers of
/// similar size, so that sums round and cancel.
inline void fill(void* data, std::size_t count, DType dtype, std::mt19937_64& random) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    if (random() % 3 != 0) {
      const float number = std::uniform_real_distribution<float>(-4.0f, 4.0f)(random);
      if (dtype == DType::float32) bits = std::bit_cast<std::uint32_t>(number);
      if (dtype == DType::float64) bits = std::bit_cast<std::uint64_t>(static_cast<double>(number) / 3);
      if (dtype == DType::float16) bits = half_bits(number, 5, 10);
      if (dtype == DType::bfloat16) bits = half_bits(number, 8, 7);
      if (dtype == DType::int32 || dtype == DType::int64) bits = static_cast<std::uint64_t>(random() % 2001) - 1000;
    }
    std::memcpy(static_cast<char*>(data) + i * size_of(dtype), &bits, size_of(dtype));
  }
}

}  // namespace paceline::reference

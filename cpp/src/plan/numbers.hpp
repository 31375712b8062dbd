// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

namespace paceline::plan {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr std::int64_t kMostInt64 = std::numeric_limits<std::int64_t>::max();

/// The sum of two numbers that are not negative; INT64_MAX if it is larger.
[[nodiscard]] inline std::int64_t saturating_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? kMostInt64 : sum;
}

/// The product of two numbers that are not negative; INT64_MAX if it is larger.
[[nodiscard]] inline std::int64_t saturating_multiply(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kMostInt64 : product;
}

/// The first multiple of `unit` that is at least `value`; the one before if that exceeds INT64_MAX. Requires: value >=
/// 0 and unit >= 1.
[[nodiscard]] inline std::int64_t rounded_up(std::int64_t value, std::int64_t unit) {
  const std::int64_t rest = value % unit;
  if (rest == 0) return value;
  return value > kMostInt64 - (unit - rest) ? value - rest : value + (unit - rest);
}

}  // namespace paceline::plan

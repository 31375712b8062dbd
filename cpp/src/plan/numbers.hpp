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

}  // namespace paceline::plan

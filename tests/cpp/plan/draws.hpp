// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace paceline::plan::testing {

/// The numbers that random cases are made of.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : random_(seed) {}

  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  std::size_t count(std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(random_);
  }
  double real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }
  /// Of a sentence, in tokens.
  double length() { return std::ceil(std::lognormal_distribution<double>(5.5, 0.8)(random_)); }

 private:
  std::mt19937_64 random_;
};

}  // namespace paceline::plan::testing

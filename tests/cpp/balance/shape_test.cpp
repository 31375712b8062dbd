// SPDX-License-Identifier: Apache-2.0
#include "balance/shape.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include <paceline/plan/random.hpp>

#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr double kFixed = 4.0;
constexpr double kPerItem = 0.1;

double seconds(std::int64_t items, double noise, plan::Random& random) {
  return (kFixed + kPerItem * static_cast<double>(items)) * std::exp(noise * random.normal());
}

double truth(double reference) { return kFixed / (kFixed + kPerItem * reference); }

TEST(ShapeEstimator, ErrorCoversTheTruthOverManySeeds) {
  int outside = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    ShapeEstimator shape(2);
    plan::Random random(seed, 0, 0);
    shape.set_reference(64.0);
    for (int k = 0; k < 8; ++k) {
      shape.add(0, k, k < 2 ? 16 : 64, seconds(k < 2 ? 16 : 64, 0.03, random));
      shape.add(1, k, k < 2 ? 80 : 64, seconds(k < 2 ? 80 : 64, 0.03, random));
    }
    shape.fit(0.03);
    outside += std::abs(shape.shape().fixed_fraction - truth(64.0)) > 2.0 * shape.error();
  }
  EXPECT_LT(outside, 24);  // expected are 5 %, or 10 % with a spread of 3
}

TEST(ShapeEstimator, AWildSampleCountsLittle) {
  ShapeEstimator shape(1);
  plan::Random random(4, 0, 0);
  shape.set_reference(64.0);
  for (int k = 0; k < 6; ++k) {
    shape.add(0, k, 64, seconds(64, 0.01, random));
    shape.add(0, k, 16, (k == 2 ? 3.0 : 1.0) * seconds(16, 0.01, random));
  }
  shape.fit(0.01);
  EXPECT_NEAR(shape.shape().fixed_fraction, truth(64.0), 0.05);
}

TEST(ShapeEstimator, StaysNonNegativeWhenSmallSizesAreFasterThanProportional) {
  ShapeEstimator shape(1);
  shape.set_reference(64.0);
  for (int k = 0; k < 10; ++k) {
    shape.add(0, k, 64, 64.0 * 64.0);
    shape.add(0, k, 16, 16.0 * 16.0);
  }
  shape.fit(0.01);
  EXPECT_GE(shape.shape().fixed_fraction, 0.0);
  EXPECT_GT(shape.shape().at(1.0), 0.0);
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include <paceline/error.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {
namespace {

TEST(CostModel, CostsNothingByDefault) {
  EXPECT_EQ(CostModel().seconds(1'000'000), 0.0);
  EXPECT_EQ(CostModel().items_within(0.0, 7), 7);
}

TEST(CostModel, AddsTheFixedCostToThePriceOfEachItem) {
  const CostModel model = CostModel::affine(0.5, 0.25);
  EXPECT_EQ(model.seconds(0), 0.5);
  EXPECT_EQ(model.seconds(6), 2.0);
  EXPECT_EQ(model.items_within(2.0, 100), 6);
  EXPECT_EQ(model.items_within(std::nextafter(2.0, 0.0), 100), 5);
  EXPECT_EQ(model.items_within(0.49, 100), -1);
  EXPECT_EQ(model.items_within(2.0, 3), 3);
}

TEST(CostModel, KeepsItsShapeWhenScaled) {
  EXPECT_EQ(CostModel::affine(1.0, 0.5).scaled(3.0), CostModel::affine(3.0, 1.5));
}

TEST(CostModel, RefusesNegativeAndInfiniteCosts) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THROW((void)CostModel::affine(-1.0, 0.0), InvalidArgument);
  EXPECT_THROW((void)CostModel::affine(0.0, nan), InvalidArgument);
  EXPECT_THROW((void)CostModel::affine(infinity, 0.0), InvalidArgument);
  EXPECT_THROW((void)CostModel::affine(1.0, 1.0).scaled(-2.0), InvalidArgument);
}

// Coefficients whose decimal fractions round at every step, and slopes far smaller than the fixed cost.
TEST(CostModel, IsNondecreasingAndInvertedExactlyInItsOwnDoubles) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(-18.0, 2.0);
  for (int round = 0; round < 2000; ++round) {
    const CostModel model = CostModel::affine(std::pow(10.0, exponent(random)), std::pow(10.0, exponent(random)));
    constexpr std::int64_t limit = 150;
    for (std::int64_t n = 0; n < limit; ++n)
      ASSERT_LE(model.seconds(n), model.seconds(n + 1)) << "round " << round << ", n " << n;
    for (int probe = 0; probe < 10; ++probe) {
      const double budget = model.seconds(static_cast<std::int64_t>(random() % limit)) * (probe % 2 == 0 ? 1.0 : 0.999);
      std::int64_t expected = -1;
      while (expected < limit && model.seconds(expected + 1) <= budget) ++expected;
      ASSERT_EQ(model.items_within(budget, limit), expected) << "round " << round << ", budget " << budget;
    }
  }
}

TEST(CostModel, FindsTheEndOfAFlatPartOfBillionsOfItems) {
  const CostModel model = CostModel::affine(1.0, 1e-26);
  const std::int64_t items = model.items_within(1.0, std::int64_t{1} << 60);
  EXPECT_EQ(model.seconds(items), 1.0);
  EXPECT_GT(model.seconds(items + 1), 1.0);
}

}  // namespace
}  // namespace paceline::plan

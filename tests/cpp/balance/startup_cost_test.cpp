// SPDX-License-Identifier: Apache-2.0
#include "balance/startup_cost.hpp"

#include <gtest/gtest.h>

namespace paceline::balance {
namespace {

constexpr double kCompute = 0.1;

void record(StartupCost& cost, int times, double seconds) {
  for (int k = 0; k < times; ++k) cost.record({0.0, seconds}, kCompute);
}

TEST(StartupCost, IsWhatWasToldUntilMeasured) {
  StartupCost cost({0.0, 0.02});
  record(cost, 8, 0.05);
  EXPECT_EQ(cost.seconds(1), 0.02) << "eight starts say little";
  record(cost, 1, 0.05);
  EXPECT_EQ(cost.seconds(1), 0.05);
  EXPECT_EQ(cost.given(1), 0.02);
}

TEST(StartupCost, IsNoBurstOfANeighbour) {
  StartupCost cost({0.0, 0.0});
  record(cost, 33, 0.0001);
  record(cost, 16, 0.09);
  EXPECT_EQ(cost.seconds(1), 0.0) << "16 of 33";
  record(cost, 1, 0.09);
  EXPECT_EQ(cost.seconds(1), 0.09);
}

TEST(StartupCost, IsForgottenAfterTwoEarlyStarts) {
  StartupCost cost({0.0, 0.0});
  record(cost, 9, 0.09);
  EXPECT_FALSE(cost.doubtful(1));
  record(cost, 1, 0.001);
  EXPECT_TRUE(cost.doubtful(1));
  EXPECT_EQ(cost.seconds(1), 0.09) << "one alone";
  record(cost, 1, 0.001);
  EXPECT_FALSE(cost.doubtful(1));
  EXPECT_EQ(cost.seconds(1), 0.0);
}

TEST(StartupCost, AnEarlyStartAloneChangesNothing) {
  StartupCost cost({0.0, 0.0});
  record(cost, 9, 0.09);
  record(cost, 1, 0.001);
  record(cost, 1, 0.08);
  record(cost, 1, 0.001);
  EXPECT_TRUE(cost.doubtful(1));
  EXPECT_EQ(cost.seconds(1), 0.09);
}

TEST(StartupCost, IsNothingWhereItIsAFewThousandthsOfTheStep) {
  StartupCost cost({0.0, 0.0});
  record(cost, 9, 0.0004);
  EXPECT_EQ(cost.seconds(1), 0.0);
}

TEST(StartupCost, WithoutWorkThereIsNoStart) {
  StartupCost cost({0.0, 0.0});
  for (int k = 0; k < 9; ++k) cost.record({0.0, std::nullopt}, kCompute);
  EXPECT_EQ(cost.samples(0), 9U);
  EXPECT_EQ(cost.samples(1), 0U);
}

}  // namespace
}  // namespace paceline::balance

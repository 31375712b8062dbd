// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include <paceline/plan/items.hpp>

#include "errors.hpp"

namespace paceline::plan {
namespace {

using Indices = std::vector<std::vector<std::int64_t>>;

std::string refusal(const std::vector<double>& costs, const std::vector<LoadModel>& models,
                    double tolerance = kItemTolerance) {
  return message_of([&] { split_items(costs, models, tolerance); });
}

TEST(ItemSplit, FindsTheOptimumThatLongestFirstMisses) {
  // Longest first makes 5 3 3 and 5 4, hence 11.
  const ItemSplit split = split_items(std::vector<double>{5, 5, 4, 3, 3}, std::vector<LoadModel>(2));
  EXPECT_EQ(split.items, (Indices{{0, 1}, {2, 3, 4}}));
  EXPECT_EQ(split.loads, (std::vector<double>{10, 10}));
  EXPECT_EQ(split.makespan_seconds, 10.0);
  EXPECT_EQ(split.lower_bound_seconds, 10.0);
  EXPECT_EQ(split.gap(), 0.0);
}

TEST(ItemSplit, IsContentWithWhatIsWithinTheTolerance) {
  const std::vector<double> costs{5, 5, 4, 3, 3};
  EXPECT_EQ(split_items(costs, std::vector<LoadModel>(2), 0.2).makespan_seconds, 11.0);
  EXPECT_EQ(split_items(costs, std::vector<LoadModel>(2), 0.05).makespan_seconds, 10.0);
}

TEST(ItemSplit, SaysWhereTheSearchEndedBeforeItProvedTheBest) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> cost(1.0, 1.1);
  std::vector<double> costs(16);
  for (double& one : costs) one = cost(random);
  const std::vector<LoadModel> models{{0.0, 1.0}, {0.0, 1.3}, {0.0, 1.9}, {0.0, 2.7}};
  EXPECT_GT(split_items(costs, models, 0.0).gap(), 0.0);
  costs.resize(10);
  EXPECT_EQ(split_items(costs, models, 0.0).gap(), 0.0);
}

TEST(ItemSplit, BreaksTiesByIndex) {
  const ItemSplit split = split_items(std::vector<double>(5, 1.0), std::vector<LoadModel>(2));
  EXPECT_EQ(split.items, (Indices{{0, 2, 4}, {1, 3}}));
}

TEST(ItemSplit, OrdersCostsThatDifferInTheirLastBitsOnly) {
  // As many devices as items: the costliest item goes to the first device, and so on.
  std::vector<double> costs;
  for (int i = 0; i < 200; ++i) costs.push_back(1.0 + i * 0x1p-45);
  const ItemSplit split = split_items(costs, std::vector<LoadModel>(200));
  for (std::int64_t device = 0; device < 200; ++device) {
    EXPECT_EQ(split.items[static_cast<std::size_t>(device)], (std::vector<std::int64_t>{199 - device}));
  }
}

TEST(ItemSplit, BoundsTheCostliestItemsByTheFastestDevices) {
  // With seventeen items, search proves nothing. Two items lie on at most two devices, which do 1 + 1/3 per second.
  std::vector<double> costs(17, 0.0);
  costs[3] = 10.3;
  costs[7] = 5.1;
  const ItemSplit split = split_items(costs, std::vector<LoadModel>{{0.0, 3.0}, {0.0, 1.0}, {0.0, 3.0}});
  EXPECT_NEAR(split.lower_bound_seconds, 15.4 * 0.75, 1e-9);
  EXPECT_NEAR(split.makespan_seconds, 15.3, 1e-12);
}

TEST(ItemSplit, OfNothingIsNothing) {
  const ItemSplit split = split_items(std::vector<double>{}, std::vector<LoadModel>(2, {3.0, 1.0}));
  EXPECT_EQ(split.items, (Indices{{}, {}}));
  EXPECT_EQ(split.makespan_seconds, 0.0);
  EXPECT_EQ(split.gap(), 0.0);
}

TEST(ItemSplit, PlacesItemsThatCostNothing) {
  const ItemSplit split = split_items(std::vector<double>{0, 0, -0.0}, std::vector<LoadModel>{{1.0, 1.0}, {0.0, 1.0}});
  EXPECT_EQ(split.items, (Indices{{}, {0, 1, 2}}));
  EXPECT_EQ(split.makespan_seconds, 0.0);
}

TEST(ItemSplit, RefusesWhatMakesNoSense) {
  const std::vector<LoadModel> one(1);
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(says(refusal({1}, {}), "over no devices"));
  EXPECT_TRUE(says(refusal({1, -1}, one), "cost at 1 is -1"));
  EXPECT_TRUE(says(refusal({infinity}, one), "cost at 0 is inf"));
  EXPECT_TRUE(says(refusal({1}, {{-1.0, 1.0}}), "fixed_seconds at 0 is -1"));
  EXPECT_TRUE(says(refusal({1}, {{0.0, infinity}}), "seconds_per_cost at 0 is inf"));
  EXPECT_TRUE(says(refusal({1e200}, {{0.0, 1e200}}), "check the units"));
  EXPECT_TRUE(says(refusal({1}, one, -1.0), "tolerance is -1"));
}

}  // namespace
}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include <paceline/error.hpp>
#include <paceline/plan/items.hpp>

namespace paceline::plan {
namespace {

using Indices = std::vector<std::vector<std::int64_t>>;

std::string refusal(const std::vector<double>& costs, const std::vector<LoadModel>& models,
                    const ItemOptions& options) {
  try {
    split_items(costs, models, options);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << part << "\" is not in \"" << text << '"';
}

TEST(ItemSplit, FindsTheOptimumThatLongestFirstMisses) {
  // Longest first: 5 3 3 against 5 4, hence 11.
  const ItemSplit split = split_items(std::vector<double>{5, 5, 4, 3, 3}, std::vector<LoadModel>(2));
  EXPECT_EQ(split.items, (Indices{{0, 1}, {2, 3, 4}}));
  EXPECT_EQ(split.loads, (std::vector<double>{10, 10}));
  EXPECT_EQ(split.makespan_seconds, 10.0);
  EXPECT_EQ(split.lower_bound_seconds, 10.0);
  EXPECT_EQ(split.gap(), 0.0);
}

TEST(ItemSplit, IsContentWithWhatIsWithinTheTolerance) {
  const std::vector<double> costs{5, 5, 4, 3, 3};
  EXPECT_EQ(split_items(costs, std::vector<LoadModel>(2), {.tolerance = 0.2}).makespan_seconds, 11.0);
  EXPECT_EQ(split_items(costs, std::vector<LoadModel>(2), {.tolerance = 0.05}).makespan_seconds, 10.0);
}

TEST(ItemSplit, SearchesNearlyEqualItemsForAsManyStepsAsItMayAndNoMore) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> cost(1.0, 1.1);
  std::uniform_real_distribution<double> slowness(1.0, 3.0);
  int unproven_by_few = 0;
  int unproven_by_many = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<double> costs(10);
    for (double& one : costs) one = cost(random);
    std::vector<LoadModel> models(4);
    for (LoadModel& model : models) model.seconds_per_cost = slowness(random);
    const auto unproven = [&](std::int64_t steps) {
      return split_items(costs, models, {.tolerance = 0.0, .search_steps = steps}).gap() > 0.0 ? 1 : 0;
    };
    unproven_by_few += unproven(64);
    unproven_by_many += unproven(std::int64_t{1} << 18);
  }
  EXPECT_GE(unproven_by_few, unproven_by_many + 5);
}

TEST(ItemSplit, GivesMoreToTheFasterDevice) {
  const ItemSplit split = split_items(std::vector<double>(12, 1.0), std::vector<LoadModel>{{0.0, 2.0}, {0.0, 1.0}});
  EXPECT_EQ(split.loads, (std::vector<double>{4, 8}));
  EXPECT_EQ(split.makespan_seconds, 8.0);
}

TEST(ItemSplit, LeavesOutADeviceWhoseFixedCostDoesNotPay) {
  const std::vector<double> costs{3, 2, 1};
  const ItemSplit split = split_items(costs, std::vector<LoadModel>{{0.5, 1.0}, {6.5, 0.1}});
  EXPECT_EQ(split.items, (Indices{{0, 1, 2}, {}}));
  EXPECT_EQ(split.makespan_seconds, 6.5) << "an idle device costs nothing, not even its fixed seconds";
  EXPECT_EQ(split_items(costs, std::vector<LoadModel>{{0.5, 1.0}, {5.0, 0.1}}).makespan_seconds, 5.2);
}

TEST(ItemSplit, BreaksTiesByIndex) {
  const ItemSplit split = split_items(std::vector<double>(5, 1.0), std::vector<LoadModel>(2));
  EXPECT_EQ(split.items, (Indices{{0, 2, 4}, {1, 3}}));
}

TEST(ItemSplit, OrdersCostsThatDifferInTheirLastBitsOnly) {
  // As many devices as items: the costliest goes to the first device, and so on.
  std::vector<double> costs;
  for (int i = 0; i < 200; ++i) costs.push_back(1.0 + i * 0x1p-45);
  const ItemSplit split = split_items(costs, std::vector<LoadModel>(200));
  for (std::int64_t device = 0; device < 200; ++device) {
    EXPECT_EQ(split.items[static_cast<std::size_t>(device)], (std::vector<std::int64_t>{199 - device}));
  }
}

TEST(ItemSplit, BoundsTheCostliestItemsByTheFastestDevices) {
  // Thirteen items: nothing is proven by search. Two items lie on at most two devices, which do 1 + 1/3 a second.
  std::vector<double> costs(13, 0.0);
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

TEST(ItemSplit, RespectsEveryKindOfCap) {
  const std::vector<double> costs{4, 3, 2, 1};
  const std::vector<LoadModel> models{{0.0, 0.01}, {0.0, 1.0}};
  EXPECT_EQ(split_items(costs, models, {.caps = {{.items = 2}, {}}}).loads, (std::vector<double>{7, 3}));
  EXPECT_EQ(split_items(costs, models, {.caps = {{.cost = 6}, {}}}).loads, (std::vector<double>{6, 4}));
  const ItemOptions memory{.caps = {{.memory = 1.0}, {}}, .memory = {0.9, 0.5, 0.5, 0.4}};
  EXPECT_EQ(split_items(costs, models, memory).items, (Indices{{1, 2}, {0, 3}}));
}

TEST(ItemSplit, AllowsASumThatIsTheCapButForRounding) {
  const std::vector<double> costs{0.1, 0.2};
  EXPECT_GT(costs[0] + costs[1], 0.3);
  EXPECT_EQ(split_items(costs, std::vector<LoadModel>(1), {.caps = {{.cost = 0.3}}}).items, (Indices{{0, 1}}));
}

TEST(ItemSplit, FindsAPackingThatLongestFirstMisses) {
  // Longest first fills 6 4 | 5 4 and has no room for the 3; 6 5 | 4 4 3 fits exactly.
  const std::vector<double> costs{6, 5, 4, 4, 3};
  const ItemSplit split = split_items(costs, std::vector<LoadModel>(2), {.caps = {{.cost = 11}, {.cost = 11}}});
  EXPECT_EQ(split.loads, (std::vector<double>{11, 11}));
}

TEST(ItemSplit, SaysWhichCapsLeaveTooLittleRoom) {
  const std::vector<LoadModel> two(2);
  EXPECT_TRUE(contains(refusal({1, 1, 1}, two, {.caps = {{.items = 1}, {.items = 1}}}),
                       "the caps on items of the 2 devices add up to 2; raise them, or split at most 2 items"));
  EXPECT_TRUE(contains(refusal({4, 3, 3}, two, {.caps = {{.cost = 4}, {.cost = 5}}}),
                       "cost adds up to 10, but the caps on it of the 2 devices to 9"));
  EXPECT_TRUE(contains(refusal({1, 1}, two, {.caps = {{.memory = 1}, {.memory = 2}}, .memory = {2, 2}}),
                       "memory adds up to 4, but the caps on it of the 2 devices to 3"));
  EXPECT_TRUE(
      contains(refusal({1, 7}, two, {.caps = {{.cost = 6}, {.cost = 6}}}),
               "item 1 has cost 7 and memory 0 and fits no device, even alone; the largest caps are 6 on cost"));
  EXPECT_TRUE(contains(refusal({9, 1, 1, 1}, two, {.caps = {{.items = 1, .cost = 20}, {.cost = 2}}}),
                       "the caps on items and on cost together leave too little room"));
}

TEST(ItemSplit, SaysWhenEverySplitWasTriedAndWhenNot) {
  const std::vector<LoadModel> two(2);
  const ItemOptions options{.caps = {{.cost = 5}, {.cost = 5}}};
  EXPECT_TRUE(contains(refusal({3, 3, 3}, two, options),
                       "there is no split of 3 items over 2 devices within the caps on cost"));
  std::vector<double> many(14, 0.0);
  many[0] = many[5] = many[9] = 3.0;
  EXPECT_TRUE(contains(refusal(many, two, options), "no split was found of 14 items"));
}

TEST(ItemSplit, RefusesWhatMakesNoSense) {
  const std::vector<LoadModel> one(1);
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(contains(refusal({1}, {}, {}), "over no devices"));
  EXPECT_TRUE(contains(refusal({1, -1}, one, {}), "cost at 1 is -1"));
  EXPECT_TRUE(contains(refusal({infinity}, one, {}), "cost at 0 is inf"));
  EXPECT_TRUE(contains(refusal({1}, {{-1.0, 1.0}}, {}), "fixed_seconds at 0 is -1"));
  EXPECT_TRUE(contains(refusal({1}, {{0.0, infinity}}, {}), "seconds_per_cost at 0 is inf"));
  EXPECT_TRUE(contains(refusal({1e200}, {{0.0, 1e200}}, {}), "check the units"));
  EXPECT_TRUE(contains(refusal({1}, one, {.caps = {{}, {}}}), "caps has 2 entries for 1 device;"));
  EXPECT_TRUE(contains(refusal({1}, one, {.caps = {{.items = -1}}}), "the cap on items of device 0 is -1"));
  EXPECT_TRUE(contains(refusal({1}, one, {.caps = {{.memory = 5}}}), "no memory per item is given"));
  EXPECT_TRUE(contains(refusal({1}, one, {.memory = {1, 2}}), "memory has 2 entries for 1 item;"));
  EXPECT_TRUE(contains(refusal({1}, one, {.tolerance = -1.0}), "tolerance is -1"));
  EXPECT_TRUE(contains(refusal({1}, one, {.search_steps = -1}), "search_steps is -1"));
}

}  // namespace
}  // namespace paceline::plan

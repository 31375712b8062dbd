// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include <paceline/error.hpp>
#include <paceline/plan/items.hpp>

#include "differencing.hpp"
#include "draws.hpp"
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

struct ItemCase {
  std::vector<double> costs;
  std::vector<LoadModel> models;
};

constexpr double kSlack = 1.0 + 1e-12;

double makespan_of(const ItemCase& c, const std::vector<std::size_t>& place) {
  double latest = 0.0;
  for (std::size_t device = 0; device < c.models.size(); ++device) {
    double cost = 0.0;
    bool any = false;
    for (std::size_t i = 0; i < place.size(); ++i) {
      if (place[i] != device) continue;
      any = true;
      cost += c.costs[i];
    }
    if (any) latest = std::max(latest, c.models[device].fixed_seconds + c.models[device].seconds_per_cost * cost);
  }
  return latest;
}

// The smallest makespan of all placements.
double best_of_all(const ItemCase& c) {
  std::vector<std::size_t> place(c.costs.size(), 0);
  double best = std::numeric_limits<double>::infinity();
  while (true) {
    best = std::min(best, makespan_of(c, place));
    std::size_t i = 0;
    while (i < place.size() && ++place[i] == c.models.size()) place[i++] = 0;
    if (i == place.size()) return best;
  }
}

// Longest processing time first, written plainly.
double longest_first(const ItemCase& c) {
  std::vector<std::size_t> order(c.costs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return c.costs[a] > c.costs[b]; });
  std::vector<std::size_t> place(c.costs.size(), c.models.size());
  std::vector<double> loads(c.models.size(), 0.0);
  for (const std::size_t item : order) {
    double first = std::numeric_limits<double>::infinity();
    std::size_t chosen = 0;
    for (std::size_t device = 0; device < c.models.size(); ++device) {
      const double finish =
          c.models[device].fixed_seconds + c.models[device].seconds_per_cost * (loads[device] + c.costs[item]);
      if (finish < first) {
        first = finish;
        chosen = device;
      }
    }
    place[item] = chosen;
    loads[chosen] += c.costs[item];
  }
  return makespan_of(c, place);
}

class ItemGenerator : public testing::Draws {
 public:
  using Draws::Draws;

  // Few different values, so that ties are common, or any double, so that rounding occurs.
  double cost(bool coarse) { return coarse ? static_cast<double>(integer(0, 6)) : real(0.0, 6.0); }

  ItemCase small() {
    ItemCase c;
    const bool coarse = chance(0.5);
    const auto devices = static_cast<std::size_t>(integer(1, 4));
    const std::int64_t items = integer(0, devices == 4 ? 8 : 10);
    for (std::int64_t i = 0; i < items; ++i) c.costs.push_back(cost(coarse));
    const bool equal = chance(0.3);
    for (std::size_t d = 0; d < devices; ++d) {
      c.models.push_back(equal && d > 0 ? c.models.front() : LoadModel{cost(coarse), coarse ? cost(true) : real(0, 2)});
    }
    return c;
  }

  ItemCase large() {
    ItemCase c;
    const auto devices = static_cast<std::size_t>(integer(1, 12));
    const std::int64_t items = integer(13, 700);
    const std::int64_t kind = integer(0, 2);
    for (std::int64_t i = 0; i < items; ++i) {
      const double tokens = length();
      c.costs.push_back(kind == 0 ? tokens : kind == 1 ? tokens * tokens : tokens * real(0.9, 1.1));
    }
    for (std::size_t d = 0; d < devices; ++d) c.models.push_back({real(0.0, 500.0), real(1.0, 4.0)});
    return c;
  }
};

std::vector<std::size_t> place_of(const ItemCase& c, const ItemSplit& split) {
  std::vector<std::size_t> place(c.costs.size(), c.models.size());
  EXPECT_EQ(split.items.size(), c.models.size());
  for (std::size_t device = 0; device < split.items.size(); ++device) {
    EXPECT_TRUE(std::is_sorted(split.items[device].begin(), split.items[device].end()));
    for (const std::int64_t item : split.items[device]) {
      EXPECT_EQ(place.at(static_cast<std::size_t>(item)), c.models.size()) << "item " << item << " went to two devices";
      place[static_cast<std::size_t>(item)] = device;
    }
  }
  EXPECT_EQ(std::count(place.begin(), place.end(), c.models.size()), 0) << "items went to no device";
  return place;
}

TEST(ItemSplitProperties, EqualsBruteForce) {
  ItemGenerator generator(1);
  for (int round = 0; round < 1500; ++round) {
    const ItemCase c = generator.small();
    const double best = best_of_all(c);
    const ItemSplit split = split_items(c.costs, c.models, 0.0);
    ASSERT_EQ(makespan_of(c, place_of(c, split)), split.makespan_seconds) << "round " << round;
    ASSERT_LE(split.makespan_seconds, best * kSlack) << "round " << round;
    ASSERT_LE(split.lower_bound_seconds, best * kSlack) << "round " << round;
    ASSERT_LE(split.gap(), 1e-11) << "the optimum was found, but not proven, in round " << round;
  }
}

TEST(ItemSplitProperties, ALowerBoundIsNeverAboveTheOptimumWhereNothingIsProven) {
  ItemGenerator generator(2);
  for (int round = 0; round < 60; ++round) {
    ItemCase c;
    for (int i = 0; i < 17; ++i) c.costs.push_back(generator.cost(round % 2 == 0));
    c.models = {{generator.real(0, 3), generator.real(1, 2)}, {generator.real(0, 3), generator.real(1, 2)}};
    const ItemSplit split = split_items(c.costs, c.models);
    const double best = best_of_all(c);
    EXPECT_LE(split.lower_bound_seconds, best * kSlack);
    EXPECT_GE(split.makespan_seconds, best / kSlack);
    EXPECT_LE(split.makespan_seconds, best * 1.02);
  }
}

TEST(ItemSplitProperties, LargeSplitsAreWholeAndNoWorseThanLongestFirst) {
  ItemGenerator generator(3);
  int compared = 0;
  for (int round = 0; round < 60; ++round) {
    const ItemCase c = generator.large();
    const ItemSplit split = split_items(c.costs, c.models);
    ASSERT_EQ(makespan_of(c, place_of(c, split)), split.makespan_seconds) << "round " << round;
    EXPECT_LE(split.lower_bound_seconds, split.makespan_seconds);
    if (c.costs.size() > 200) continue;  // the plain version is cubic
    ++compared;
    EXPECT_LE(split.makespan_seconds, longest_first(c)) << "round " << round;
  }
  EXPECT_GT(compared, 8);
}

TEST(ItemSplitProperties, UnitsOfCostAndTimeDoNotMatter) {
  ItemGenerator generator(5);
  for (int round = 0; round < 40; ++round) {
    const ItemCase c = generator.large();
    ItemCase scaled = c;
    for (double& cost : scaled.costs) cost *= 0x1p-20;
    for (LoadModel& model : scaled.models) model = {model.fixed_seconds * 0x1p-7, model.seconds_per_cost * 0x1p13};
    const ItemSplit split = split_items(c.costs, c.models);
    const ItemSplit other = split_items(scaled.costs, scaled.models);
    ASSERT_EQ(split.items, other.items) << "round " << round;
    EXPECT_EQ(split.makespan_seconds * 0x1p-7, other.makespan_seconds);
  }
}

TEST(ItemSplitProperties, LognormalLengthsComeWithinTheToleranceOfTheBound) {
  ItemGenerator generator(6);
  for (int round = 0; round < 10; ++round) {
    std::vector<double> costs;
    for (int i = 0; i < 1024; ++i) costs.push_back(generator.length());
    std::vector<LoadModel> models;
    for (int i = 0; i < 8; ++i) models.push_back({generator.real(0, 1000), generator.real(1, 4)});
    EXPECT_LE(split_items(costs, models).gap(), kItemTolerance * kSlack);
  }
}

// Differencing is closer to even on two and three devices, and farther from it on eight.
TEST(ItemSplitProperties, OnEqualDevicesItIsAboutAsEvenAsDifferencing) {
  ItemGenerator generator(7);
  double worst = 0.0;
  double sum = 0.0;
  int splits = 0;
  for (const std::size_t devices : {2, 3, 4, 8}) {
    for (const std::size_t items : {9, 13, 16, 20, 32, 64, 200}) {
      for (int round = 0; round < 12; ++round) {
        std::vector<double> tokens;
        for (std::size_t i = 0; i < items; ++i) tokens.push_back(generator.length());
        const double reference = testing::largest_differencing_load(tokens, devices);
        const double behind = split_items(tokens, std::vector<LoadModel>(devices)).makespan_seconds / reference - 1.0;
        worst = std::max(worst, behind);
        sum += behind;
        ++splits;
      }
    }
  }
  EXPECT_LE(sum / splits, 0.0);
  EXPECT_LE(worst, 0.015);
}

}  // namespace
}  // namespace paceline::plan

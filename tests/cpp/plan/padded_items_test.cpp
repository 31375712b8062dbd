// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <paceline/plan/padded_items.hpp>

#include "draws.hpp"
#include "errors.hpp"

namespace paceline::plan {
namespace {

using Indices = std::vector<std::vector<std::int64_t>>;
using Models = std::vector<LoadModel>;

constexpr double kNever = std::numeric_limits<double>::infinity();

Models of_speeds(const std::vector<double>& speeds) {
  Models models;
  for (const double speed : speeds) models.push_back({0.0, 1.0 / speed});
  return models;
}

Models equal(std::size_t devices) { return Models(devices); }

double seconds(const LoadModel& model, std::size_t items, double longest) {
  return items == 0 ? 0.0 : model.fixed_seconds + model.seconds_per_cost * (static_cast<double>(items) * longest);
}

// The smallest makespan over all orders of the devices and all cuts of the sorted items.
double least_of_contiguous(std::vector<double> costs, const Models& models) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  const std::size_t least = costs.size() >= models.size() ? 1 : 0;
  std::vector<std::size_t> order(models.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  double best = kNever;
  const std::function<void(std::size_t, std::size_t, double)> cut = [&](std::size_t turn, std::size_t begin,
                                                                        double latest) {
    if (turn == order.size()) {
      if (begin == costs.size()) best = std::min(best, latest);
      return;
    }
    for (std::size_t items = least; begin + items <= costs.size(); ++items) {
      const double longest = items > 0 ? costs[begin] : 0.0;
      cut(turn + 1, begin + items, std::max(latest, seconds(models[order[turn]], items, longest)));
    }
  };
  do cut(0, 0, 0.0);
  while (std::next_permutation(order.begin(), order.end()));
  return best;
}

double makespan_of(const std::vector<double>& costs, const Models& models, const Indices& items) {
  double latest = 0.0;
  for (std::size_t device = 0; device < models.size(); ++device) {
    double longest = 0.0;
    for (const std::int64_t item : items[device]) longest = std::max(longest, costs[static_cast<std::size_t>(item)]);
    latest = std::max(latest, seconds(models[device], items[device].size(), longest));
  }
  return latest;
}

// The smallest makespan over all placements of the items, also those that are not contiguous.
double least_of_all(const std::vector<double>& costs, const Models& models) {
  std::vector<std::size_t> place(costs.size(), 0);
  double best = kNever;
  while (true) {
    Indices items(models.size());
    for (std::size_t i = 0; i < place.size(); ++i) items[place[i]].push_back(static_cast<std::int64_t>(i));
    const bool allowed = costs.size() < models.size() ||
                         std::none_of(items.begin(), items.end(), [](const auto& mine) { return mine.empty(); });
    if (allowed) best = std::min(best, makespan_of(costs, models, items));
    std::size_t i = 0;
    while (i < place.size() && ++place[i] == models.size()) place[i++] = 0;
    if (i == place.size()) return best;
  }
}

void expect_sound(const std::vector<double>& costs, const Models& models, const ItemSplit& split) {
  ASSERT_EQ(split.items.size(), models.size());
  ASSERT_EQ(split.loads.size(), models.size());
  std::vector<std::int64_t> seen;
  std::vector<std::pair<double, double>> ranges;  // of the items' costs
  for (std::size_t device = 0; device < models.size(); ++device) {
    const std::vector<std::int64_t>& mine = split.items[device];
    EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
    EXPECT_TRUE(!mine.empty() || costs.size() < models.size()) << "device " << device << " has nothing";
    std::pair<double, double> range{kNever, 0.0};
    for (const std::int64_t item : mine) {
      seen.push_back(item);
      range.first = std::min(range.first, costs[static_cast<std::size_t>(item)]);
      range.second = std::max(range.second, costs[static_cast<std::size_t>(item)]);
    }
    EXPECT_EQ(split.loads[device], static_cast<double>(mine.size()) * range.second);
    if (!mine.empty()) ranges.push_back(range);
  }
  std::sort(seen.begin(), seen.end());
  std::vector<std::int64_t> all(costs.size());
  std::iota(all.begin(), all.end(), 0);
  ASSERT_EQ(seen, all);
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t k = 1; k < ranges.size(); ++k) {
    EXPECT_GE(ranges[k].first, ranges[k - 1].second) << "items of two devices are not in order of cost";
  }
  EXPECT_EQ(split.makespan_seconds, makespan_of(costs, models, split.items));
  EXPECT_LE(split.lower_bound_seconds, split.makespan_seconds);
}

class PaddedGenerator : public testing::Draws {
 public:
  using Draws::Draws;

  std::vector<double> lengths(std::size_t items) {
    std::vector<double> lengths(items);
    for (double& one : lengths) one = length();
    return lengths;
  }

  // Few different values, so that ties are common, or any double, so that rounding occurs.
  std::vector<double> costs(std::size_t items) {
    const bool coarse = chance(0.5);
    std::vector<double> costs(items);
    for (double& cost : costs) cost = coarse ? static_cast<double>(integer(0, 5)) : real(0.0, 6.0);
    return costs;
  }

  Models models(std::size_t devices) {
    const bool fixed = chance(0.3);
    const bool coarse = chance(0.5);
    Models models;
    for (std::size_t d = 0; d < devices; ++d) {
      if (d > 0 && chance(0.4)) {
        models.push_back(models[count(0, d - 1)]);
        continue;
      }
      models.push_back({fixed ? static_cast<double>(integer(0, 4)) : 0.0,
                        coarse ? static_cast<double>(integer(0, 3)) : 1.0 / real(0.2, 3.0)});
    }
    return models;
  }
};

TEST(PaddedSplit, EqualsTheBestOfAllCutsAndOrders) {
  PaddedGenerator generator(1);
  for (int round = 0; round < 1500; ++round) {
    const std::size_t devices = generator.count(1, 5);
    const std::vector<double> costs = generator.costs(generator.count(0, 10));
    const Models models = generator.models(devices);
    const ItemSplit split = split_padded(costs, models);
    ASSERT_NO_FATAL_FAILURE(expect_sound(costs, models, split)) << "round " << round;
    ASSERT_EQ(split.makespan_seconds, least_of_contiguous(costs, models)) << "round " << round;
    ASSERT_EQ(split.lower_bound_seconds, split.makespan_seconds) << "round " << round;
  }
}

TEST(PaddedSplit, NoOtherDealIsFaster) {
  PaddedGenerator generator(2);
  for (int round = 0; round < 200; ++round) {
    const std::size_t devices = generator.count(1, 4);
    const std::vector<double> costs = generator.costs(generator.count(1, devices == 4 ? 7 : 8));
    const Models models = generator.models(devices);
    ASSERT_EQ(split_padded(costs, models).makespan_seconds, least_of_all(costs, models)) << "round " << round;
  }
}

// Whether the devices, in this order, can run all items within `time` if each takes as many as fit and at least one.
bool covers(std::vector<double> costs, const Models& models, double time) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  std::size_t taken = 0;
  for (std::size_t d = 0; d < models.size(); ++d) {
    const double longest = costs[taken];
    const std::size_t most = costs.size() - taken - (models.size() - d - 1);
    std::size_t items = 0;
    while (items < most && seconds(models[d], items + 1, longest) <= time) ++items;
    if (items == 0) return false;
    taken += items;
  }
  return taken == costs.size();
}

// Whether `time` is the smallest double that suffices. If a time suffices, every longer time does, too.
bool is_least(const std::vector<double>& costs, const Models& models, double time) {
  return covers(costs, models, time) && !covers(costs, models, std::nextafter(time, 0.0));
}

TEST(PaddedSplit, ManyEqualDevicesHaveTheExactOptimumToo) {
  PaddedGenerator generator(3);
  for (int round = 0; round < 100; ++round) {
    const std::size_t devices = generator.count(1, 80);
    const std::vector<double> costs = generator.lengths(generator.count(devices, 1000));
    const ItemSplit split = split_padded(costs, equal(devices));
    ASSERT_NO_FATAL_FAILURE(expect_sound(costs, equal(devices), split));
    ASSERT_TRUE(is_least(costs, equal(devices), split.makespan_seconds)) << "round " << round;
    ASSERT_EQ(split.gap(), 0.0);
  }
}

TEST(PaddedSplit, BeyondTwelveUnequalDevicesItSaysWhatIsNotProven) {
  PaddedGenerator generator(4);
  int unproven = 0;
  for (int round = 0; round < 20; ++round) {
    const std::size_t devices = generator.count(13, 20);
    const std::vector<double> costs = generator.lengths(devices * generator.count(1, 80));
    std::vector<double> speeds(devices);
    for (double& speed : speeds) speed = generator.real(0.5, 2.0);
    const ItemSplit split = split_padded(costs, of_speeds(speeds));
    ASSERT_NO_FATAL_FAILURE(expect_sound(costs, of_speeds(speeds), split));
    unproven += split.gap() > 0.0 ? 1 : 0;
  }
  EXPECT_GT(unproven, 15);
}

TEST(PaddedSplit, ManyDevicesOfTwoSpeedsAreStillExact) {
  PaddedGenerator generator(5);
  std::vector<double> speeds(40, 1.0);
  std::fill(speeds.begin(), speeds.begin() + 17, 2.5);
  const std::vector<double> costs = generator.lengths(500);
  EXPECT_EQ(split_padded(costs, of_speeds(speeds)).gap(), 0.0);
}

TEST(PaddedSplit, MoreDifferentDevicesThanAnyDoubleCountsOrdersOfAreNotTakenForOneSpeed) {
  Models models = of_speeds({1000.0, 990.0});
  for (int i = 0; i < 1100; ++i) models.push_back({0.0, 1.0 + 1e-7 * i});
  const ItemSplit split = split_padded(std::vector<double>(300, 1.0), models);
  EXPECT_EQ(split.items[0].size() + split.items[1].size(), 300u)
      << "one item takes a slow device longer than these all";
}

TEST(PaddedSplit, TheOrderOfSpeedsIsFoundNotAssumed) {
  // 4 is possible only if the middle device begins, with the longest item alone. Then the fastest takes three and the
  // slowest none.
  const std::vector<double> costs{4, 3, 3, 3, 3, 1, 1};
  const Models models = of_speeds({1.0, 3.0, 0.5});
  const ItemSplit split = split_padded(costs, models);
  EXPECT_EQ(split.makespan_seconds, 4.0);
  EXPECT_EQ(split.items, (Indices{{0}, {1, 2, 3, 4}, {5, 6}}));
}

TEST(PaddedSplit, FewLongItemsAreAsMuchAsManyShortOnes) {
  const ItemSplit split = split_padded(std::vector<double>{2, 9, 3, 1, 2, 8, 3, 2}, equal(2));
  EXPECT_EQ(split.items, (Indices{{1, 5}, {0, 2, 3, 4, 6, 7}}));
  EXPECT_EQ(split.loads, (std::vector<double>{18, 18}));
}

TEST(PaddedSplit, NoDeviceHasNothingWhereThereIsEnough) {
  const ItemSplit one = split_padded(std::vector<double>{1, 1, 1, 1}, of_speeds({1000.0, 1.0}));
  EXPECT_EQ(one.items, (Indices{{0, 1, 2}, {3}}));
  const ItemSplit few = split_padded(std::vector<double>{3, 7}, equal(4));
  EXPECT_EQ(few.items, (Indices{{1}, {0}, {}, {}}));
  EXPECT_EQ(few.makespan_seconds, 7.0);
  EXPECT_EQ(split_padded(std::vector<double>{3, 7}, of_speeds({1.0, 100.0, 1.0})).items[1].size(), 2U);
  EXPECT_EQ(split_padded({}, equal(2)).items, (Indices{{}, {}}));
}

TEST(PaddedSplit, TiesAreStable) {
  const ItemSplit split = split_padded(std::vector<double>(6, 2.0), equal(3));
  EXPECT_EQ(split.items, (Indices{{0, 1}, {2, 3}, {4, 5}}));
  PaddedGenerator generator(6);
  for (int round = 0; round < 20; ++round) {
    std::vector<double> costs = generator.lengths(200);
    const Models models = generator.models(6);
    const ItemSplit once = split_padded(costs, models);
    EXPECT_EQ(split_padded(costs, models).items, once.items);
    for (double& cost : costs) cost *= 8.0;
    Models slower = models;
    for (LoadModel& model : slower) model.fixed_seconds *= 8.0;
    EXPECT_EQ(split_padded(costs, slower).items, once.items) << "the unit of cost does not matter";
  }
}

TEST(PaddedSplit, NumbersOfAnySizeAreSplitExactly) {
  const std::vector<double> costs{1e300, 1e-300, 1e-300, 3.0, 5e-324};
  for (const Models& models : {of_speeds({1.0, 1e-5}), Models{{0.0, 1e-320}, {1e-300, 0.0}}}) {
    const ItemSplit split = split_padded(costs, models);
    expect_sound(costs, models, split);
    EXPECT_EQ(split.makespan_seconds, least_of_contiguous(costs, models));
  }
}

TEST(PaddedSplit, RefusesWhatMakesNoSense) {
  const auto refusal = [](const std::vector<double>& costs, const Models& models) {
    return message_of([&] { split_padded(costs, models); });
  };
  EXPECT_TRUE(says(refusal({1.0}, {}), "pass one model per device"));
  EXPECT_TRUE(says(refusal({1.0, -1.0}, equal(1)), "cost at 1 is -1"));
  EXPECT_TRUE(says(refusal({std::nan("")}, equal(1)), "cost at 0 is nan"));
  EXPECT_TRUE(says(refusal({1.0}, {{0.0, -1.0}}), "seconds_per_cost at 0"));
  EXPECT_TRUE(says(refusal({1e308, 1.0}, equal(1)), "more seconds than a double holds"));
}

}  // namespace
}  // namespace paceline::plan

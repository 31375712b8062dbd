// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/item_arrangement.hpp>
#include <paceline/plan/item_packing.hpp>

namespace paceline::plan {
namespace {

const ItemShape kPadded{.cost = {1.0, 1.0, 0.0}};

double total(const std::vector<double>& lengths, const ItemShape& shape, const std::vector<std::int64_t>& bounds) {
  double sum = 0.0;
  for (std::size_t k = 0; k + 1 < bounds.size(); ++k) {
    sum += shape.micro_batch({lengths.begin() + bounds[k], lengths.begin() + bounds[k + 1]});
  }
  return sum;
}

/// The smallest total over all cuts.
double least_total(const std::vector<double>& lengths, const ItemShape& shape, std::size_t least, std::size_t most) {
  double best = std::numeric_limits<double>::infinity();
  for (std::uint32_t mask = 0; mask < (1U << (lengths.size() - 1)); ++mask) {
    std::vector<std::int64_t> bounds{0};
    for (std::size_t k = 1; k < lengths.size(); ++k) {
      if ((mask >> (k - 1) & 1U) != 0) bounds.push_back(static_cast<std::int64_t>(k));
    }
    bounds.push_back(static_cast<std::int64_t>(lengths.size()));
    bool fits = true;
    for (std::size_t k = 0; k + 1 < bounds.size(); ++k) {
      const auto size = static_cast<std::size_t>(bounds[k + 1] - bounds[k]);
      fits = fits && size <= most && size >= std::min(least, lengths.size());
    }
    if (fits) best = std::min(best, total(lengths, shape, bounds));
  }
  return best;
}

std::vector<double> lengths_of(std::mt19937_64& rng, std::size_t count) {
  std::lognormal_distribution<double> draw(1.0, 0.9);
  std::vector<double> lengths(count);
  for (double& length : lengths) length = std::round(draw(rng));
  std::sort(lengths.begin(), lengths.end(), std::greater<>());
  return lengths;
}

TEST(ItemPacking, FindsTheBestOfAllCuts) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < 400; ++round) {
    const std::vector<double> lengths = lengths_of(rng, 1 + rng() % 12);
    const ItemShape shape{.cost = {0.5 * static_cast<double>(rng() % 40), 1.0, 0.1 * static_cast<double>(rng() % 3)}};
    const std::size_t most = round % 2 == 0 ? 100 : 1 + rng() % 5;
    const std::size_t least = round % 3 == 0 ? 1 + rng() % 3 : 1;
    const PackOptions options{.max_items = static_cast<std::int64_t>(most),
                              .min_items = static_cast<std::int64_t>(least),
                              .least_fixed = 0.0};
    const std::vector<std::int64_t> bounds = pack_items(lengths, shape, options);
    const std::size_t allowed = std::max(most, 2 * least - 1);
    ASSERT_NEAR(total(lengths, shape, bounds), least_total(lengths, shape, least, allowed), 1e-9) << "round " << round;
    for (std::size_t k = 0; k + 1 < bounds.size(); ++k) {
      ASSERT_LE(bounds[k + 1] - bounds[k], static_cast<std::int64_t>(allowed));
    }
  }
}

TEST(ItemPacking, EqualLengthsAreOneMicroBatch) {
  EXPECT_EQ(pack_items(std::vector<double>(50, 3.0), kPadded), (std::vector<std::int64_t>{0, 50}));
}

TEST(ItemPacking, FreeMicroBatchesAreStillFew) {
  std::vector<double> lengths(1000);
  std::iota(lengths.rbegin(), lengths.rend(), 1.0);
  const std::size_t pieces = pack_items(lengths, {.cost = {0.0, 1.0, 0.0}}).size() - 1;
  EXPECT_GE(pieces, 4U);
  EXPECT_LE(pieces, 32U);
}

TEST(ItemPacking, WithoutPaddingPiecesAreEqualAndFew) {
  const std::vector<double> lengths(100, 1.0);
  const ItemShape cheap{.cost = {0.1, 1.0, 0.0}, .measure = ItemMeasure::sum};
  EXPECT_EQ(pack_items(lengths, cheap), (std::vector<std::int64_t>{0, 25, 50, 75, 100}));
  const ItemShape dear{.cost = {10.0, 1.0, 0.0}, .measure = ItemMeasure::sum};
  EXPECT_EQ(pack_items(lengths, dear), (std::vector<std::int64_t>{0, 100}));
  EXPECT_EQ(pack_items(lengths, dear, {.max_items = 60}), (std::vector<std::int64_t>{0, 60, 100}));
}

TEST(ItemPacking, NothingIsNoMicroBatch) { EXPECT_EQ(pack_items({}, kPadded), (std::vector<std::int64_t>{0})); }

TEST(ItemPacking, RefusesWhatMakesNoSense) {
  EXPECT_THROW(pack_items(std::vector<double>{1.0, 2.0}, kPadded), InvalidArgument);
  EXPECT_THROW(pack_items(std::vector<double>{-1.0}, kPadded), InvalidArgument);
  EXPECT_THROW(pack_items(std::vector<double>{std::nan("")}, kPadded), InvalidArgument);
  EXPECT_THROW(pack_items(std::vector<double>{1.0}, kPadded, {.max_items = 0}), InvalidArgument);
  EXPECT_THROW(pack_items(std::vector<double>{1.0}, kPadded, {.min_items = 0}), InvalidArgument);
}

void expect_every_item_once(const ItemArrangement& made, std::size_t items, std::size_t devices) {
  std::vector<std::int64_t> sorted = made.order;
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::int64_t> all(items);
  std::iota(all.begin(), all.end(), 0);
  ASSERT_EQ(sorted, all);
  ASSERT_EQ(made.first.size(), devices + 1);
  ASSERT_EQ(made.first.back(), made.bounds.size() - 1);
  ASSERT_EQ(made.bounds.back(), static_cast<std::int64_t>(items));
  ASSERT_TRUE(std::is_sorted(made.bounds.begin(), made.bounds.end()));
}

TEST(ItemArrangement, WorkFollowsTheTargetsPaddingIncluded) {
  std::mt19937_64 rng(7);
  std::lognormal_distribution<double> draw(4.0, 0.6);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> costs(256);
    double sum = 0.0;
    for (double& cost : costs) sum += cost = std::round(draw(rng)) + 1.0;
    const std::vector<double> targets{1.0, 0.5 + 0.1 * static_cast<double>(round % 10), 0.25};
    const double fixed = 0.004 * sum;
    const std::vector<ItemShape> shapes(3, {.cost = {fixed, 1.0, round % 2 == 0 ? 0.0 : 0.005}});
    const ItemArrangement made = arrange_items(costs, targets, shapes);
    expect_every_item_once(made, costs.size(), 3);
    double work = 0.0;
    for (const double one : made.work) work += one;
    const double ideal = work / std::accumulate(targets.begin(), targets.end(), 0.0);
    for (std::size_t d = 0; d < 3; ++d) EXPECT_NEAR(made.work[d] / targets[d], ideal, 0.02 * ideal) << round;
  }
}

TEST(ItemArrangement, WhoHasNoTargetGetsNothingAndWhoHasOneGetsAnItem) {
  const std::vector<double> costs(20, 1.0);
  const std::vector<ItemShape> shapes(3, kPadded);
  const ItemArrangement made = arrange_items(costs, std::vector<double>{1.0, 0.0, 1e-6}, shapes);
  expect_every_item_once(made, 20, 3);
  EXPECT_EQ(made.bounds[made.first[1]], 19);
  EXPECT_EQ(made.first[1], made.first[2]);
  EXPECT_EQ(made.bounds[made.first[3]] - made.bounds[made.first[2]], 1);
}

TEST(ItemArrangement, NoMicroBatchIsSmallerThanTheLeast) {
  std::mt19937_64 rng(11);
  std::lognormal_distribution<double> draw(2.0, 1.0);
  for (int round = 0; round < 3000; ++round) {
    std::vector<double> costs(1 + rng() % 40);
    for (double& cost : costs) cost = rng() % 5 == 0 ? 1.0 : std::round(draw(rng));
    const std::size_t devices = 1 + rng() % 4;
    std::vector<double> targets;
    for (std::size_t d = 0; d < devices; ++d)
      targets.push_back(d > 0 && rng() % 4 == 0 ? 0.0 : static_cast<double>(1 + rng() % 9));
    const ItemMeasure measure = rng() % 3 == 0 ? ItemMeasure::sum : ItemMeasure::padded;
    const std::vector<ItemShape> shapes(
        devices, {.cost = {0.1 * static_cast<double>(rng() % 30), 1.0, 0.0}, .measure = measure});
    const auto least = static_cast<std::int64_t>(1 + rng() % 3);
    const std::int64_t most = rng() % 2 == 0 ? 1000 : static_cast<std::int64_t>(1 + rng() % 8);
    const ItemArrangement made =
        arrange_items(costs, targets, shapes, {.max_items = most, .min_items = least, .plain_costs = rng() % 4 == 0});
    expect_every_item_once(made, costs.size(), devices);
    for (std::size_t k = 0; k + 1 < made.bounds.size(); ++k) {
      const std::int64_t size = made.bounds[k + 1] - made.bounds[k];
      ASSERT_GE(size, std::min(least, static_cast<std::int64_t>(costs.size()))) << "round " << round;
      ASSERT_LE(size, std::max(most, 2 * least - 1)) << "round " << round;
      for (std::int64_t i = made.bounds[k] + 1; i < made.bounds[k + 1]; ++i) {
        const auto at = [&](std::int64_t position) {
          return costs[static_cast<std::size_t>(made.order[static_cast<std::size_t>(position)])];
        };
        ASSERT_GE(at(i - 1), at(i)) << "round " << round;
      }
    }
  }
}

TEST(ItemArrangement, ItemsWithoutCostAreSpread) {
  const ItemArrangement made =
      arrange_items(std::vector<double>(40, 0.0), std::vector<double>{1.0, 1.0}, std::vector<ItemShape>(2, kPadded));
  expect_every_item_once(made, 40, 2);
  EXPECT_EQ(made.bounds[made.first[1]], 20);
}

TEST(ItemArrangement, RatiosAreOfTheCostsAlone) {
  std::vector<double> costs(64, 1.0);
  std::fill(costs.begin(), costs.begin() + 32, 3.0);
  // A fixed cost that makes up most of the work.
  const std::vector<ItemShape> shapes(2, {.cost = {1000.0, 1.0, 0.0}});
  const ItemArrangement made = arrange_items(costs, std::vector<double>{1.0, 3.0}, shapes, {.plain_costs = true});
  double first = 0.0;
  for (std::int64_t k = 0; k < made.bounds[made.first[1]]; ++k) {
    first += costs[static_cast<std::size_t>(made.order[static_cast<std::size_t>(k)])];
  }
  EXPECT_NEAR(first, 32.0, 1.0);
}

TEST(ItemArrangement, RefusesWhatMakesNoSense) {
  const std::vector<ItemShape> one(1, kPadded);
  const std::vector<double> target{1.0};
  EXPECT_THROW(arrange_items(std::vector<double>{-1.0}, target, one), InvalidArgument);
  EXPECT_THROW(arrange_items(std::vector<double>{1.0}, std::vector<double>{0.0}, one), InvalidArgument);
  EXPECT_THROW(arrange_items(std::vector<double>{1.0}, std::vector<double>{1.0, 1.0}, one), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

#include "brute_force.hpp"
#include "draws.hpp"
#include "errors.hpp"

namespace paceline::plan {
namespace {

using Shares = std::vector<std::int64_t>;

std::string refusal(std::int64_t batch_size, const std::vector<CostModel>& models, const SplitOptions& options) {
  return message_of([&] { (void)split_batch(batch_size, models, options); });
}

struct ByHand {
  const char* what;
  std::vector<CostModel> models;
  std::int64_t items;
  SplitOptions options;
  Shares shares;
  double makespan = -1.0;  // not compared
};

// What random cases below do not come to, beside two that show what a split is.
TEST(BatchSplit, IsWhatOneWouldPlanByHand) {
  const CostModel even = CostModel::affine(0.0, 1.0);
  const std::vector<CostModel> a_bit_apart{CostModel::affine(1.0, 0.0),
                                           CostModel::affine(std::nextafter(1.0, 0.0), 0.0)};
  const ShareLimits some{.maximum = 40'000'000};
  const std::vector<ByHand> all{
      {"what is left goes first",
       std::vector(8, CostModel::affine(0.004, 0.0001)),
       515,
       {},
       {65, 65, 65, 64, 64, 64, 64, 64}},
      {"finish times count, not speeds", {CostModel::affine(6.0, 1.0), even}, 10, {}, {2, 8}, 8.0},
      {"a difference of one bit", a_bit_apart, 3, {.granularity = 4}, {0, 3}, std::nextafter(1.0, 0.0)},
      {"flat costs of millions",
       std::vector(3, CostModel::affine(1.0, 0.0)),
       100'000'000,
       {.limits = {some, some, some}},
       {40'000'000, 40'000'000, 20'000'000},
       1.0},
      {"costs too small to add up",
       {CostModel::affine(1.0, 1e-25), CostModel(), CostModel::affine(0.0, 1e-300)},
       1'000'000'000'000,
       {},
       {0, 1'000'000'000'000, 0},
       0.0}};
  for (const ByHand& one : all) {
    const Split split = split_batch(one.items, one.models, one.options);
    EXPECT_EQ(split.shares, one.shares) << one.what;
    if (one.makespan >= 0.0) {
      EXPECT_EQ(split.makespan_seconds, one.makespan) << one.what;
    }
  }
}

TEST(BatchSplit, NamesTheConstraintThatCannotBeMet) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  SplitOptions options;
  options.limits = {{.maximum = 3}, {.maximum = 4}};
  EXPECT_TRUE(says(refusal(8, models, options), "maximums of the 2 devices add up to 7"));
  options.limits = {{.minimum = 5, .may_be_zero = false}, {.minimum = 4, .may_be_zero = false}};
  EXPECT_TRUE(says(refusal(8, models, options), "must take part (may_be_zero is false) add up to 9"));
  EXPECT_TRUE(says(refusal(0, models, options), "add up to 9"));
  options.limits = {{.minimum = 5, .maximum = 6}, {.minimum = 5, .maximum = 6}};
  EXPECT_TRUE(says(refusal(8, models, options), "2 devices have a minimum above one item"));
  options.limits = {{.maximum = 0, .may_be_zero = false}, {}};
  EXPECT_TRUE(says(refusal(8, models, options), "device 0 must take part"));
  options.limits = {{.maximum = 7}, {.maximum = 7}};
  options.granularity = 4;
  EXPECT_TRUE(says(refusal(12, models, options), "granularity 4: below their maximums the 2 devices can take 8"));
}

TEST(BatchSplit, RefusesNumbersThatMakeNoSense) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(says(refusal(8, {}, {}), "no devices"));
  EXPECT_TRUE(says(refusal(-1, models, {}), "batch_size is -1"));
  EXPECT_TRUE(says(refusal(8, models, {.granularity = 0}), "granularity is 0"));
  EXPECT_TRUE(says(refusal(8, models, {.limits = {{}}}), "limits has 1 entry where 2 are needed"));
  EXPECT_TRUE(
      says(refusal(8, models, {.limits = {{.minimum = 4, .maximum = 3}, {}}}), "device 0 has minimum 4 and maximum 3"));
  EXPECT_TRUE(says(refusal(8, models, {.limits = {{}, {.startup_seconds = nan}}}), "startup_seconds at 1 is nan"));
  EXPECT_TRUE(says(refusal(8, models, {.reduction_seconds = {0.0, 1.0}}),
                   "reduction_seconds has 2 entries where 3 are needed"));
  EXPECT_TRUE(says(refusal(8, models, {.reduction_seconds = {0.0, 1.0, -1.0}}), "reduction_seconds at 2 is -1"));
  EXPECT_TRUE(says(refusal(8, models, {.previous = {1}}), "previous has 1 entry"));
  EXPECT_TRUE(says(refusal(8, models, {.previous = {1, -1}}), "previous share 1 is -1"));
  EXPECT_TRUE(says(refusal(8, {CostModel::affine(0.0, 1e308)}, {}), "overflows at 8 items"));
}

TEST(WeightedSplit, FollowsTheRatios) {
  EXPECT_EQ(split_weighted(512, std::array{2.0, 1.0}), (Shares{341, 171}));
  EXPECT_EQ(split_weighted(10, std::array{1.0, 0.0, 4.0}), (Shares{2, 0, 8}));
}

TEST(WeightedSplit, GivesWhatIsLeftToTheLargestRemainderAndOnATieToTheLowerIndex) {
  EXPECT_EQ(split_weighted(10, std::array{1.0, 1.0, 1.0}), (Shares{4, 3, 3}));
  EXPECT_EQ(split_weighted(10, std::array{0.14, 0.57, 0.29}), (Shares{1, 6, 3}));
}

TEST(WeightedSplit, IsWithinOneItemOfTheQuotaAndKeepsZeros) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(-12.0, 12.0);
  for (int round = 0; round < 5000; ++round) {
    std::vector<double> weights(1 + random() % 12);
    for (double& weight : weights) weight = random() % 4 == 0 ? 0.0 : std::pow(10.0, exponent(random) * (round % 2));
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (sum == 0.0) continue;
    const auto batch_size = static_cast<std::int64_t>(random() % 10'000);
    const Shares shares = split_weighted(batch_size, weights);
    ASSERT_EQ(std::accumulate(shares.begin(), shares.end(), std::int64_t{0}), batch_size);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      ASSERT_GE(shares[i], 0);
      ASSERT_TRUE(weights[i] > 0.0 || shares[i] == 0);
      ASSERT_LT(std::abs(static_cast<double>(shares[i]) - static_cast<double>(batch_size) * weights[i] / sum),
                1.0 + 1e-6);
    }
  }
}

TEST(WeightedSplit, SurvivesWeightsWhoseSumOverflows) {
  EXPECT_EQ(split_weighted(4, std::array{1.7e308, 1.7e308}), (Shares{2, 2}));
  EXPECT_EQ(split_weighted(4, std::array{5e-324, 5e-324}), (Shares{2, 2}));
}

TEST(WeightedSplit, RefusesWeightsThatAreNoRatio) {
  EXPECT_THROW((void)split_weighted(4, std::array{1.0, -1.0}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(4, std::array{1.0, std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(4, std::array{0.0, 0.0}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(4, {}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(-4, std::array{1.0}), InvalidArgument);
}

TEST(EvenSplit, DiffersByAtMostOneItemTheLargerSharesFirst) {
  EXPECT_EQ(split_even(10, 4), (Shares{3, 3, 2, 2}));
  EXPECT_EQ(split_even(2, 4), (Shares{1, 1, 0, 0}));
  EXPECT_EQ(split_even(0, 2), (Shares{0, 0}));
}

TEST(EvenSplit, RefusesNoDevicesAndNegativeBatches) {
  EXPECT_THROW((void)split_even(4, 0), InvalidArgument);
  EXPECT_THROW((void)split_even(-1, 2), InvalidArgument);
}

using testing::Case;

class SplitGenerator : public testing::Draws {
 public:
  using Draws::Draws;

  // Few different values, so that ties are common, or any double, so that rounding occurs.
  double seconds(bool coarse, double scale) {
    return coarse ? scale * static_cast<double>(integer(0, 4)) / 4.0 : real(0.0, scale);
  }

  CostModel model(bool coarse) { return CostModel::affine(seconds(coarse, 4.0), seconds(coarse, 2.0)); }

  Case next(std::int64_t most_devices, std::int64_t largest_batch) {
    Case c;
    const bool coarse = chance(0.6);
    const auto devices = static_cast<std::size_t>(integer(1, most_devices));
    c.batch_size = integer(0, largest_batch);
    for (std::size_t i = 0; i < devices; ++i)
      c.models.push_back(chance(0.25) && i > 0 ? c.models.back() : model(coarse));
    if (chance(0.4)) c.options.granularity = integer(2, 5);
    if (chance(0.6)) {
      const double gaps = chance(0.5) ? 0.5 : 0.0;
      for (std::size_t i = 0; i < devices; ++i) {
        ShareLimits limits;
        if (chance(0.4)) limits.maximum = integer(0, largest_batch);
        if (chance(gaps)) limits.minimum = integer(0, std::min<std::int64_t>(limits.maximum, largest_batch / 2 + 1));
        limits.may_be_zero = !chance(0.15);
        if (chance(0.4)) limits.startup_seconds = seconds(coarse, 3.0);
        c.options.limits.push_back(limits);
      }
    }
    if (chance(0.3)) {
      for (std::size_t i = 0; i <= devices; ++i) c.options.reduction_seconds.push_back(seconds(coarse, 3.0));
    }
    if (chance(0.5)) {
      for (std::size_t i = 0; i < devices; ++i)
        c.options.previous.push_back(integer(0, 2 * c.batch_size / static_cast<std::int64_t>(devices) + 1));
    }
    return c;
  }

  // The present split with a few items moved, as a previous plan usually looks.
  void make_previous_near(Case& c, std::vector<std::int64_t> shares) {
    for (std::int64_t moves = integer(0, 2); moves > 0 && shares.size() > 1; --moves) {
      const auto from = static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(shares.size()) - 1));
      const auto to = static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(shares.size()) - 1));
      if (shares[from] < c.options.granularity) continue;
      shares[from] -= c.options.granularity;
      shares[to] += c.options.granularity;
    }
    c.options.previous = std::move(shares);
  }
};

// Returns whether the case has a solution. Fails with the case printed.
bool agrees_with_brute_force(const Case& c) {
  const auto expected = testing::best_by_brute_force(c);
  if (!expected) {
    EXPECT_THROW((void)split_batch(c.batch_size, c.models, c.options), InvalidArgument) << testing::describe(c);
    return false;
  }
  try {
    const Split split = split_batch(c.batch_size, c.models, c.options);
    EXPECT_EQ(split.makespan_seconds, testing::makespan_of(c, *expected)) << testing::describe(c);
    EXPECT_EQ(split.shares, *expected) << testing::describe(c);
  } catch (const Error& error) {
    ADD_FAILURE() << error.what() << "\n"
                  << testing::describe(c) << "\n  brute force found " << testing::describe(*expected);
  }
  return true;
}

void check_random_cases(std::uint64_t seed, int rounds, std::int64_t most_devices, std::int64_t largest_batch,
                        int least_solved) {
  SplitGenerator generator(seed);
  int solved = 0;
  for (int round = 0; round < rounds && !::testing::Test::HasFailure(); ++round) {
    Case c = generator.next(most_devices, largest_batch);
    if (!agrees_with_brute_force(c)) continue;
    ++solved;
    generator.make_previous_near(c, split_batch(c.batch_size, c.models, c.options).shares);
    agrees_with_brute_force(c);
  }
  EXPECT_GE(solved, least_solved) << "too few of the cases had a solution for this test to mean anything";
}

TEST(BatchSplitProperty, EqualsBruteForceOnSmallRandomCases) { check_random_cases(1, 16000, 4, 12, 10000); }

TEST(BatchSplitProperty, EqualsBruteForceOnLargerBatches) { check_random_cases(2, 1500, 3, 40, 800); }

TEST(BatchSplitProperty, EqualsBruteForceOnEightDevices) { check_random_cases(3, 400, 8, 7, 200); }

// Too large to enumerate, so this tests what holds for every correct answer.
TEST(BatchSplitProperty, SharesSumToTheBatchAndCannotBeImprovedByMovingAGrain) {
  SplitGenerator generator(4);
  for (int round = 0; round < 2000 && !HasFailure(); ++round) {
    Case c;
    const auto devices = static_cast<std::size_t>(generator.integer(1, 64));
    c.batch_size = generator.integer(1, generator.chance(0.1) ? 10'000'000 : 5000);
    for (std::size_t i = 0; i < devices; ++i) c.models.push_back(generator.model(generator.chance(0.3)));
    if (generator.chance(0.5)) {
      for (std::size_t i = 0; i < devices; ++i) {
        c.options.limits.push_back(
            {.maximum = generator.integer((c.batch_size - 1) / static_cast<std::int64_t>(devices) + 1, c.batch_size),
             .startup_seconds = generator.seconds(false, 3.0)});
      }
    }
    const Split split = split_batch(c.batch_size, c.models, c.options);
    ASSERT_TRUE(testing::allowed(c, split.shares)) << testing::describe(c);
    ASSERT_EQ(split.makespan_seconds, testing::makespan_of(c, split.shares)) << testing::describe(c);
    // The split is optimal if and only if all devices together could finish fewer items in a shorter time.
    std::int64_t sooner = 0;
    for (std::size_t i = 0; i < devices; ++i) {
      std::int64_t low = 0;
      std::int64_t high = std::min(testing::limits_of(c, i).maximum, c.batch_size);
      while (low < high) {
        const std::int64_t middle = high - (high - low) / 2;
        if (testing::seconds_of(c, i, middle) < split.makespan_seconds)
          low = middle;
        else
          high = middle - 1;
      }
      sooner += low;
    }
    ASSERT_LT(sooner, c.batch_size) << testing::describe(c) << "\n" << testing::describe(split.shares);
  }
}

TEST(BatchSplitProperty, RemainderReductionAndPreviousHoldOnManyDevices) {
  SplitGenerator generator(5);
  for (int round = 0; round < 200 && !HasFailure(); ++round) {
    Case c;
    const auto devices = static_cast<std::size_t>(generator.integer(9, 40));
    c.batch_size = generator.integer(64, 3000);
    c.options.granularity = generator.integer(1, 16);
    for (std::size_t i = 0; i < devices; ++i) c.models.push_back(generator.model(false));
    if (generator.chance(0.5)) {
      for (std::size_t i = 0; i < devices; ++i) c.options.limits.push_back({.minimum = generator.integer(0, 60)});
    }
    if (generator.chance(0.3)) {
      for (std::size_t i = 0; i <= devices; ++i) c.options.reduction_seconds.push_back(generator.seconds(false, 1.0));
    }
    const Split split = split_batch(c.batch_size, c.models, c.options);
    ASSERT_TRUE(testing::allowed(c, split.shares)) << testing::describe(c) << "\n" << testing::describe(split.shares);
    ASSERT_EQ(split.makespan_seconds, testing::makespan_of(c, split.shares)) << testing::describe(c);
    c.options.previous = split.shares;
    ASSERT_EQ(split_batch(c.batch_size, c.models, c.options).shares, split.shares) << testing::describe(c);
  }
}

}  // namespace
}  // namespace paceline::plan

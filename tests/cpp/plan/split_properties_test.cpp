// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

#include "brute_force.hpp"
#include "draws.hpp"

namespace paceline::plan {
namespace {

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

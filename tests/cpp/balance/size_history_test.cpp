// SPDX-License-Identifier: Apache-2.0
#include "balance/size_history.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

StepTimings timings_of(const Shares& shares, bool excluded, double more_seconds = 0.0) {
  StepTimings timings;
  for (const std::int64_t share : shares) {
    auto& runs = timings.devices.emplace_back();
    if (share > 0) runs.push_back({share, static_cast<double>(share) + more_seconds, excluded});
  }
  return timings;
}

/// At one second per item.
double makespan(const Shares& shares) { return static_cast<double>(*std::max_element(shares.begin(), shares.end())); }

TEST(SizeHistory, KnowsWhatEachDeviceRan) {
  SizeHistory sizes({0, 0});
  EXPECT_TRUE(sizes.is_new({4, 0}));
  sizes.record({4, 6}, timings_of({4, 6}, false));
  EXPECT_FALSE(sizes.is_new({4, 6}));
  EXPECT_FALSE(sizes.is_new({4, 0})) << "nothing is no size";
  EXPECT_TRUE(sizes.is_new({6, 4})) << "each device compiles for itself";
}

TEST(SizeHistory, TakesTheLargestOfAClass) {
  SizeHistory sizes({0, 0, 1});
  sizes.record({4, 6, 1}, timings_of({4, 6, 1}, false));
  EXPECT_EQ(sizes.largest(0), 6);
  EXPECT_EQ(sizes.largest(2), 1);
}

TEST(SizeHistory, ChargesTheMedianOfWhatFirstRunsTookMore) {
  SizeHistory sizes({0, 0});
  EXPECT_EQ(sizes.first_run_seconds(makespan), 0.0);
  sizes.record({5, 5}, timings_of({5, 5}, true, 60.0));  // the first step of all
  sizes.record({3, 7}, timings_of({3, 7}, true, 10.0));
  sizes.record({7, 3}, timings_of({7, 3}, true, 12.0));
  EXPECT_DOUBLE_EQ(sizes.first_run_seconds(makespan), 12.0);
  sizes.record({7, 3}, timings_of({7, 3}, true, 500.0));
  EXPECT_DOUBLE_EQ(sizes.first_run_seconds(makespan), 12.0) << "no size was new";
}

TEST(SizeHistory, IsFreeWhereNewSharesBringNoNewSizes) {
  SizeHistory sizes({0, 0});
  sizes.record({5, 5}, timings_of({5, 5}, true, 60.0));
  sizes.record({3, 7}, timings_of({3, 7}, false));
  sizes.record({7, 3}, timings_of({7, 3}, false));
  EXPECT_EQ(sizes.first_run_seconds(makespan), 0.0);
}

TEST(SizeHistory, ForgetsTheOldestOfManySizes) {
  SizeHistory sizes({0});
  for (std::int64_t n = 1; n <= 300; ++n) sizes.record({n}, timings_of({n}, false));
  EXPECT_TRUE(sizes.is_new({1}));
  EXPECT_FALSE(sizes.is_new({300}));
  EXPECT_EQ(sizes.largest(0), 300);
}

}  // namespace
}  // namespace paceline::balance

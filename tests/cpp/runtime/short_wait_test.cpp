// SPDX-License-Identifier: Apache-2.0
#include "runtime/short_wait.hpp"

#include <gtest/gtest.h>

#include <chrono>

namespace paceline::internal {
namespace {

/// Advances by a microsecond with each query.
struct FakeClock {
  using duration = std::chrono::microseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<FakeClock>;
  static constexpr bool is_steady = true;
  static time_point now() { return time_point(passed += duration(1)); }
  inline static duration passed{0};
};

using Wait = BasicShortWait<FakeClock>;

/// A wait that ends as soon as it sleeps.
void wait_shortly(Wait& wait) {
  EXPECT_TRUE(wait.until(true, [] { return false; }, [] { return true; }));
}

struct Counts {
  int looks = 0;
  int sleeps = 0;
  bool operator==(const Counts&) const = default;
};

/// Done at the given query, or once it sleeps.
Counts wait_until(Wait& wait, bool may_spin, int look, std::chrono::microseconds sleep = {}) {
  Counts counts;
  const auto done = [&] { return ++counts.looks == look; };
  EXPECT_TRUE(wait.until(may_spin, done, [&] {
    ++counts.sleeps;
    FakeClock::passed += sleep;
    return true;
  }));
  return counts;
}

TEST(ShortWait, SpinsOnlyAfterAShortWaitAndWhereItMay) {
  Wait wait;
  EXPECT_EQ(wait_until(wait, true, 1), (Counts{0, 1})) << "the first time";
  wait_shortly(wait);
  EXPECT_EQ(wait_until(wait, true, 3), (Counts{3, 0}));
  wait_shortly(wait);
  EXPECT_EQ(wait_until(wait, false, 1), (Counts{0, 1}));
}

TEST(ShortWait, SleepsOnceItHasSpunAsLongAsAWakeUpTakes) {
  Wait wait;
  wait_shortly(wait);
  const Counts counts = wait_until(wait, true, 0);
  EXPECT_GT(counts.looks, 10);
  EXPECT_LE(counts.looks, Wait::kSpin.count());
  EXPECT_EQ(counts.sleeps, 1);
}

TEST(ShortWait, DoesNotSpinAfterALongWaitUntilOneWasShortAgain) {
  Wait wait;
  wait_shortly(wait);
  wait_until(wait, true, 0, 2 * Wait::kShort);
  EXPECT_EQ(wait_until(wait, true, 1).looks, 0);
  EXPECT_EQ(wait_until(wait, true, 1).looks, 1);
}

TEST(ShortWait, SaysWhatTheSleepSaid) {
  Wait wait;
  EXPECT_FALSE(wait.until(true, [] { return false; }, [] { return false; }));
}

}  // namespace
}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#include "balance/move_judge.hpp"

#include <gtest/gtest.h>

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

std::optional<MoveJudge::Verdict> feed(MoveJudge& log, int steps, double seconds, std::int64_t batch = 100) {
  for (int k = 0; k < steps; ++k) {
    auto verdict = log.observe(batch, seconds * (k % 2 == 0 ? 1.001 : 0.999), false, 0.002);
    if (verdict) return verdict;
  }
  return std::nullopt;
}

TEST(MoveJudge, DoesNotBlameTheMoveForAChangeOfSpeed) {
  MoveJudge log;
  feed(log, 10, 1.0);
  log.started(10, 100, {50, 50}, {60, 40}, 0.05);
  feed(log, 4, 0.95);
  log.observe(100, 2.0, true, 0.002);
  EXPECT_FALSE(feed(log, 10, 2.0));
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::overtaken);
}

TEST(MoveJudge, JudgesOnStepsOfTheSameBatchSizeOnly) {
  MoveJudge log;
  feed(log, 10, 1.0);
  log.started(10, 100, {50, 50}, {60, 40}, 0.05);
  EXPECT_FALSE(feed(log, 20, 3.0, 300));
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::pending);
}

TEST(MoveJudge, ComparesWithTheStepsSinceAChangeOfSpeed) {
  MoveJudge log;
  feed(log, 10, 1.0);
  log.observe(100, 2.0, false, 0.002);
  log.observe(100, 2.0, true, 0.002);  // the second outlier confirms the first: both ran slow
  log.started(12, 100, {50, 50}, {60, 40}, 0.3);
  EXPECT_FALSE(feed(log, 8, 1.4));
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::kept);
  EXPECT_NEAR(log.moves().back().measured_gain, 0.3, 0.01);
}

TEST(MoveJudge, DoesNotJudgeAMoveBeforeWhichNothingRan) {
  MoveJudge log;
  log.started(0, 100, {50, 50}, {60, 40}, 0.05);
  EXPECT_FALSE(feed(log, 10, 1.0));
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::unjudged);
}

TEST(MoveJudge, DoesNotJudgeAMoveByTheFewStepsThatRanAsPlanned) {
  for (const int as_planned : {3, 12}) {
    MoveJudge log;
    feed(log, as_planned, 1.0);
    for (int step = 0; step < 8; ++step) log.skip(100);
    log.started(20, 100, {50, 50}, {100, 0}, 0.3);
    const auto verdict = feed(log, 8, 2.0);
    EXPECT_EQ(verdict.has_value(), as_planned == 12);
    const MoveOutcome outcome = as_planned == 12 ? MoveOutcome::taken_back : MoveOutcome::unjudged;
    EXPECT_EQ(log.moves().back().outcome, outcome);
  }
}

TEST(MoveJudge, DoesNotJudgeAMoveByTheFewStepsThatRanAsPlannedInALongRun) {
  MoveJudge log;
  for (int step = 0; step < 40; ++step) {
    feed(log, 1, 1.0);
    for (int k = 0; k < 9; ++k) log.skip(100);
  }
  log.started(400, 100, {50, 50}, {100, 0}, 0.3);
  EXPECT_FALSE(feed(log, 20, 2.0));
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::unjudged);
}

TEST(MoveJudge, DoesNotJudgeAMoveAfterWhichFewStepsRanAsPlanned) {
  MoveJudge log;
  feed(log, 20, 1.0);
  log.started(20, 100, {50, 50}, {60, 40}, 0.05);
  for (int step = 0; step < 100; ++step) {
    EXPECT_FALSE(feed(log, 1, 2.0)) << step;
    for (int k = 0; k < 2; ++k) log.skip(100);
  }
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::unjudged);
}

TEST(MoveJudge, ForgetsTheBatchSizeThatRanLongestAgo) {
  MoveJudge log;
  feed(log, 10, 1.0, 1000);  // the largest size
  for (std::int64_t batch = 1; batch <= 20; ++batch) feed(log, 10, 1.0, batch);
  feed(log, 10, 1.0, 1);  // the smallest size, once more
  for (std::int64_t batch = 21; batch <= 40; ++batch) feed(log, 10, 1.0, batch);
  log.started(1, 1, {1}, {1}, 0.05);
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::pending) << "times of the smallest size are known";
  log.started(2, 1000, {1}, {1}, 0.05);
  EXPECT_EQ(log.moves().back().outcome, MoveOutcome::unjudged) << "those of the one that ran first are not";
}

}  // namespace
}  // namespace paceline::balance

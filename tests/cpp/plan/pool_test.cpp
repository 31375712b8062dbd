// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>
#include <paceline/plan/random.hpp>

#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

TEST(Pool, OffersTheSmallestKeyToTheFastestIdleDevice) {
  Box box({2.0, 1.0});
  box.submit(0.0);
  EXPECT_EQ(devices_of(box.last), (Devices{1}));
  const PoolStart first = box.last.starts[0];
  box.submit(0.1, {.priority = Priority::batch});
  box.submit(0.1, {.priority = Priority::normal});  // 3 jobs > 0.5 * (2 / 1 - 1): the slow device takes as well
  const JobId urgent = box.submit(0.2, {.priority = Priority::interactive});
  box.submit(0.2, {.deadline_seconds = 30.0});
  EXPECT_EQ(box.finish(1.0, first).starts.at(0).jobs, (Jobs{urgent}));
}

TEST(Pool, DeclinesForFasterBusyDevicesAndSaysWhy) {
  Box box({1.0, 10.0});
  box.submit(0.0);
  box.submit(0.0);
  ASSERT_TRUE(box.last.starts.empty());
  ASSERT_EQ(box.last.declines.size(), 1U);
  EXPECT_EQ(box.last.declines[0].reason, PoolReason::faster_devices);
  EXPECT_NE(box.pool.describe(box.last.declines[0]).find("d1 leaves 'work' waiting: faster devices"),
            std::string::npos);
  for (int more = 0; more < 3; ++more) box.submit(0.0);
  EXPECT_TRUE(box.last.starts.empty());  // 4 <= 0.5 * 9
  box.submit(0.0);
  EXPECT_EQ(devices_of(box.last), (Devices{1}));
}

TEST(Pool, ProbesADeviceThatHasDeclinedForFiveSeconds) {
  Box box({1.0, 10.0});
  box.submit(0.0);
  box.submit(1.0, {.priority = Priority::batch});
  ASSERT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.last.wake_seconds, 6.0);
  EXPECT_TRUE(box.pool.tick(5.9).starts.empty());
  const PoolDecisions probe = box.pool.tick(6.0);
  ASSERT_EQ(devices_of(probe), (Devices{1}));
  EXPECT_TRUE(probe.starts[0].probe);
}

TEST(Pool, ProbesWithNoJobThatHasADeadline) {
  Box box({1.0, 10.0});
  box.submit(0.0);
  const JobId timed = box.submit(1.0, {.deadline_seconds = 100.0});
  EXPECT_TRUE(box.pool.tick(10.0).starts.empty());
  const JobId plain = box.submit(11.0, {.priority = Priority::batch});
  EXPECT_EQ(box.last.starts.at(0).jobs, (Jobs{plain}));
  EXPECT_NE(timed, plain);
}

TEST(Pool, LetsEveryDeviceTakeAnUnknownKindUntilEachClassHasThreeSamples) {
  Box box({});
  for (int d = 0; d < 2; ++d)
    (void)box.pool.add_device(0.0, {.name = "u" + std::to_string(d), .device_class = std::to_string(d)});
  for (int sample = 0; sample < 3; ++sample) {
    for (std::size_t d = 0; d < 2; ++d) {
      box.submit(0.0);
      ASSERT_EQ(box.last.starts.size(), 1U);
      const PoolStart start = box.last.starts[0];
      box.submit(0.0);
      ASSERT_EQ(box.last.starts.size(), 1U) << "sample " << sample;
      const PoolStart other = box.last.starts[0];
      (void)box.finish(0.0, start);
      (void)box.finish(0.0, other);
    }
  }
  (void)box.pool.measure(0.0, 0, 0, CostModel::affine(0.0, 1.0), 3);
  (void)box.pool.measure(0.0, 1, 0, CostModel::affine(0.0, 10.0), 3);
  box.submit(0.0);
  box.submit(0.0);
  EXPECT_TRUE(box.last.starts.empty());
}

TEST(Pool, PlacesInTurnByWeightByCountAndByFinish) {
  const auto placed = [](Placement placement) {
    // The device on which a job runs is the one that it was bound to.
    std::vector<int> count(3, 0);
    std::vector<PoolStart> running;
    Box box({1.0, 2.0, 4.0}, {.placement = placement});
    for (int job = 0; job < 7; ++job) {
      box.submit(0.0);
      running.insert(running.end(), box.last.starts.begin(), box.last.starts.end());
    }
    while (!running.empty()) {
      const PoolStart start = running.back();
      running.pop_back();
      ++count[start.devices[0]];
      box.finish(100.0, start);
      running.insert(running.end(), box.last.starts.begin(), box.last.starts.end());
    }
    return count;
  };
  EXPECT_EQ(placed(Placement::round_robin), (std::vector<int>{3, 2, 2}));
  EXPECT_EQ(placed(Placement::weighted), (std::vector<int>{4, 2, 1}));
  EXPECT_EQ(placed(Placement::least_outstanding), (std::vector<int>{3, 2, 2}));
  EXPECT_EQ(placed(Placement::earliest_finish), (std::vector<int>{4, 2, 1}));
}

TEST(Pool, AsksTheUsersFunctionWhereAJobStarts) {
  std::vector<std::size_t> asked;
  PoolOptions options{.placement = Placement::custom};
  options.choose = [&](const PoolQuestion& question) -> std::optional<std::size_t> {
    asked.push_back(question.candidates.size());
    for (auto one = question.candidates.rbegin(); one != question.candidates.rend(); ++one) {
      if (one->idle && one->seconds < 5.0) return one->device;  // the slowest that is not too slow
    }
    return std::nullopt;
  };
  Box box({1.0, 2.0, 10.0}, options);
  box.submit(0.0);
  EXPECT_EQ(devices_of(box.last), (Devices{1}));
  box.submit(0.0);
  box.submit(0.0);
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.last.declines.at(0).reason, PoolReason::chosen_otherwise);
  EXPECT_EQ(asked.front(), 3U);
  EXPECT_THROW(PoolState({.placement = Placement::custom}), InvalidArgument);
}

TEST(Pool, StartsBackgroundWorkOnlyWhereNothingElseWaits) {
  Box box({1.0, 10.0});
  const JobId background = box.submit(0.0, {.priority = Priority::background});
  EXPECT_EQ(box.last.starts.at(0).jobs, (Jobs{background}));
  const PoolStart running = box.last.starts[0];
  box.submit(0.0, {.priority = Priority::background});
  box.submit(0.0);  // the slow device declines both
  EXPECT_TRUE(box.last.starts.empty());
  // This one would end soonest on the slow device, for which another job waits.
  const std::size_t quick = box.pool.add_kind({.name = "quick"});
  for (const std::size_t d : {0U, 1U}) (void)box.pool.measure(0.0, d, quick, CostModel::affine(0.0, 0.1), 3);
  const auto starts_quick = [&](double now) {
    box.submit(now, {.kind = quick, .priority = Priority::background});
    return std::ranges::any_of(box.last.starts, [&](const PoolStart& one) { return one.kind == quick; });
  };
  EXPECT_FALSE(starts_quick(0.0));
  EXPECT_EQ(box.last.declines.back().reason, PoolReason::foreground);
  box.finish(1.0, running);
  ASSERT_EQ(box.last.starts.size(), 2U) << "the other job, and the quick one";
  box.finish(1.1, box.last.starts[1]);
  box.submit(1.1, {.gang = 2});  // it waits for the fast device
  EXPECT_FALSE(starts_quick(1.1));
}

TEST(Pool, RefusesWhatCannotEndInTimeAndExpiresWhatNoLongerCan) {
  Box box({1.0, 4.0});
  const JobId late = box.submit(0.0, {.deadline_seconds = 1.2});  // 1.3 * 1
  ASSERT_EQ(box.last.ends.size(), 1U);
  EXPECT_EQ(box.last.ends[0].job, late);
  EXPECT_EQ(box.last.ends[0].outcome, JobOutcome::rejected);
  EXPECT_EQ(box.last.ends[0].reason, PoolReason::deadline);
  box.submit(0.0);
  const JobId waits = box.submit(0.0, {.deadline_seconds = 3.0});  // the slow device cannot end it in time
  EXPECT_TRUE(box.last.starts.empty() && box.last.ends.empty());
  EXPECT_NEAR(box.last.wake_seconds, 1.7, 1e-9);
  const PoolDecisions expired = box.pool.tick(box.last.wake_seconds);
  ASSERT_EQ(expired.ends.size(), 1U);
  EXPECT_EQ(expired.ends[0].job, waits);
  EXPECT_EQ(expired.ends[0].outcome, JobOutcome::expired);
}

TEST(Pool, LetsASlowDeviceTakeALaterJobThatItCanEndInTime) {
  Box box({1.0, 4.0}, {.placement = Placement::any});
  box.submit(0.0);
  box.submit(0.0, {.deadline_seconds = 3.0});
  const JobId later = box.submit(0.0, {.deadline_seconds = 6.0});
  ASSERT_EQ(devices_of(box.last), (Devices{1}));
  EXPECT_EQ(box.last.starts[0].jobs, (Jobs{later}));
}

TEST(Pool, BoundsItsQueue) {
  Box box({1.0}, {}, {.name = "work", .queue_limit = 2});
  for (int job = 0; job < 3; ++job) box.submit(0.0);
  EXPECT_FALSE(box.pool.has_room(0));
  box.submit(0.0);
  EXPECT_EQ(box.last.ends.at(0).reason, PoolReason::queue_full);
  EXPECT_EQ(box.pool.waiting(), 2);
  Box standard({1.0, 1.0}, {}, {.name = "work", .sizes = {1, 2, 4}});
  for (int job = 0; job < 2 + 8 * 4 * 2; ++job) {
    standard.submit(0.0);
    EXPECT_TRUE(standard.last.ends.empty());
  }
  EXPECT_FALSE(standard.pool.has_room(0));
}

TEST(Pool, StartsNothingBeforeItsTime) {
  Box box({1.0});
  const JobId later = box.submit(0.0, {.not_before_seconds = 2.0});
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.last.wake_seconds, 2.0);
  EXPECT_TRUE(box.pool.tick(1.9).starts.empty());
  EXPECT_EQ(box.pool.tick(2.0).starts.at(0).jobs, (Jobs{later}));
}

TEST(Pool, CancelsWhatWaitsAndNotWhatRuns) {
  Box box({1.0});
  const JobId running = box.submit(0.0);
  const JobId waits = box.submit(0.0);
  const JobId dependent = box.submit(0.0, {.after = {waits}});
  bool cancelled = true;
  EXPECT_TRUE(box.pool.cancel(0.0, running, cancelled).ends.empty());
  EXPECT_FALSE(cancelled);
  const PoolDecisions decisions = box.pool.cancel(0.0, waits, cancelled);
  EXPECT_TRUE(cancelled);
  ASSERT_EQ(decisions.ends.size(), 2U);
  EXPECT_EQ(decisions.ends[0].reason, PoolReason::on_request);
  EXPECT_EQ(decisions.ends[1].job, dependent);
  EXPECT_EQ(decisions.ends[1].outcome, JobOutcome::cancelled);
  EXPECT_EQ(decisions.ends[1].cause, waits);
  EXPECT_TRUE(box.pool.cancel(0.0, waits, cancelled).ends.empty());
  EXPECT_FALSE(cancelled);
}

TEST(PoolBatches, AnIdlePoolStartsWhatItIsGivenWhateverWasMeasured) {
  // Of equal devices each might leave a job to the other one, by rounding.
  Random random(7, 0, 0);
  for (int round = 0; round < 20000; ++round) {
    PoolState pool;
    const std::size_t kind = pool.add_kind({.name = "score", .sizes = {1, 2, 4, 8}});
    const auto seconds = [&] { return random.uniform() < 0.1 ? 0.0 : std::pow(10.0, -9.0 * random.uniform()); };
    const CostModel shared = CostModel::affine(seconds(), seconds());
    const bool equal = random.uniform() < 0.5;
    for (std::size_t device = 0; device < 2; ++device) {
      (void)pool.add_device(0.0, {.name = device == 0 ? "a" : "b", .device_class = device == 0 || equal ? "x" : "y"});
    }
    for (std::size_t device = 0; device < 2; ++device) {
      (void)pool.measure(0.0, device, kind, equal ? shared : CostModel::affine(seconds(), seconds()), 5);
    }
    JobId id{};
    const double deadline = random.uniform() < 0.5 ? std::numeric_limits<double>::infinity() : 10.0;
    ASSERT_EQ(pool.submit(1.0, {.kind = kind, .deadline_seconds = deadline}, id).starts.size(), 1U) << round;
  }
}

}  // namespace
}  // namespace paceline::plan::testing

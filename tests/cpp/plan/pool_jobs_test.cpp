// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

TEST(PoolJobs, StartsWhatDependsOnOthersWhenTheLastHasCompleted) {
  Box box({1.0, 1.0});
  const JobId first = box.submit(0.0);
  const PoolStart one = box.last.starts.at(0);
  const JobId second = box.submit(0.0);
  const PoolStart two = box.last.starts.at(0);
  const JobId both = box.submit(0.0, {.after = {first, second}});
  EXPECT_TRUE(box.finish(1.0, one).starts.empty());
  EXPECT_EQ(box.finish(1.0, two).starts.at(0).jobs, (Jobs{both}));
  EXPECT_THROW(box.submit(1.0, {.after = {JobId{99}}}), InvalidArgument);
}

TEST(PoolJobs, PassesAFailureOnAlongALongChain) {
  Box box({1.0}, {}, {.name = "work", .queue_limit = 1000000});
  JobId last = box.submit(0.0);
  const PoolStart start = box.last.starts.at(0);
  for (int link = 0; link < 100000; ++link) last = box.submit(0.0, {.after = {last}});
  const PoolDecisions& decisions = box.finish(1.0, start, RunResult::failed);
  ASSERT_EQ(decisions.ends.size(), 100001U);
  EXPECT_EQ(decisions.ends[0].outcome, JobOutcome::failed);
  EXPECT_EQ(decisions.ends.back().job, last);
}

TEST(PoolJobs, RunsAFailedBatchAgainInHalvesUntilOneJobFailsAlone) {
  for (const bool idempotent : {true, false}) {
    Box box({1.0}, {}, {.name = "work", .sizes = {1, 2, 4}, .idempotent = idempotent});
    box.submit(0.0);
    PoolStart start = box.last.starts.at(0);
    Jobs jobs;
    for (int job = 0; job < 4; ++job) jobs.push_back(box.submit(0.0));
    start = box.finish(1.0, start).starts.at(0);
    ASSERT_EQ(start.jobs, jobs);
    const JobId bad = jobs[2];
    std::vector<PoolEnd> ends;
    for (int run = 0; run < 10; ++run) {
      const bool fails = std::find(start.jobs.begin(), start.jobs.end(), bad) != start.jobs.end();
      const PoolDecisions& decisions = box.finish(2.0, start, fails ? RunResult::failed : RunResult::completed);
      ends.insert(ends.end(), decisions.ends.begin(), decisions.ends.end());
      if (decisions.starts.empty()) break;
      start = decisions.starts[0];
      EXPECT_LE(start.jobs.size(), 2U);
    }
    ASSERT_EQ(ends.size(), 4U);
    for (const PoolEnd& end : ends)
      EXPECT_EQ(end.outcome, end.job == bad || !idempotent ? JobOutcome::failed : JobOutcome::completed);
  }
}

TEST(PoolJobs, HalvesTheLargestBatchOfADeviceThatRanOutOfMemory) {
  Box box({1.0}, {}, {.name = "work", .sizes = {1, 2, 4}});
  box.submit(0.0);
  PoolStart start = box.last.starts.at(0);
  for (int job = 0; job < 4; ++job) box.submit(0.0);
  start = box.finish(1.0, start).starts.at(0);
  ASSERT_EQ(start.jobs.size(), 4U);
  start = box.finish(2.0, start, RunResult::out_of_memory).starts.at(0);
  EXPECT_EQ(start.jobs.size(), 2U);
  EXPECT_EQ(box.pool.largest_batch(0, 0), 2);
  start = box.finish(3.0, start, RunResult::out_of_memory).starts.at(0);
  EXPECT_EQ(start.jobs.size(), 1U);
  // One alone does not fit: nothing of this kind can run any more.
  EXPECT_EQ(box.finish(4.0, start, RunResult::out_of_memory).ends.size(), 4U);
  EXPECT_EQ(box.last.ends[0].reason, PoolReason::out_of_memory);
  EXPECT_EQ(box.pool.waiting(), 0);
}

TEST(PoolJobs, RunsIdempotentJobsOfALostDeviceElsewhere) {
  Box box({1.0, 1.0}, {}, {.name = "work", .idempotent = true});
  const JobId job = box.submit(0.0);
  const PoolStart start = box.last.starts.at(0);
  (void)box.pool.retire(0.0, 0);
  const PoolDecisions& decisions = box.finish(1.0, start, RunResult::device_lost);
  ASSERT_EQ(devices_of(decisions), (Devices{1}));
  EXPECT_EQ(decisions.starts[0].jobs, (Jobs{job}));
}

TEST(PoolJobs, FailsWhatOnlyALostDeviceCouldRun) {
  Box box({1.0, 1.0});
  const std::size_t first = box.pool.add_need({.labels = {"d0"}});
  const JobId running = box.submit(0.0, {.need = first});
  const PoolStart start = box.last.starts.at(0);
  const JobId waits = box.submit(0.0, {.need = first});
  const JobId held = box.submit(0.0, {.need = first, .not_before_seconds = 9.0});
  const JobId after = box.submit(0.0, {.after = {held}});
  const JobId gang = box.submit(0.0, {.gang = 2});
  const JobId other = box.submit(0.0, {.after = {running}});
  const PoolDecisions lost = box.pool.lose(1.0, 0);
  std::vector<std::pair<JobId, PoolReason>> ends;
  for (const PoolEnd& end : lost.ends) ends.emplace_back(end.job, end.reason);
  EXPECT_EQ(ends, (std::vector<std::pair<JobId, PoolReason>>{{waits, PoolReason::device_lost},
                                                             {held, PoolReason::device_lost},
                                                             {after, PoolReason::dependency},
                                                             {gang, PoolReason::device_lost}}));
  EXPECT_EQ(box.finish(1.0, start, RunResult::device_lost).ends.at(0).reason, PoolReason::device_lost);
  EXPECT_EQ(box.last.ends.at(1).job, other);
  box.submit(2.0, {.need = first});
  EXPECT_EQ(box.last.ends.at(0).reason, PoolReason::no_device);
  (void)box.pool.restore(3.0, 0);
  box.submit(3.0, {.need = first});
  EXPECT_EQ(devices_of(box.last), (Devices{0}));
}

TEST(PoolJobs, WaitsForADeviceThatIsOnlyRetired) {
  Box box({1.0});
  (void)box.pool.retire(0.0, 0);
  box.submit(0.0);
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_EQ(devices_of(box.pool.restore(1.0, 0)), (Devices{0}));
}

TEST(PoolJobs, TakesARunBackThatHasNotBegun) {
  Box box({1.0, 1.0}, {}, {.name = "work", .sizes = {1, 2, 4}, .idempotent = true});
  (void)box.pool.retire(0.0, 0);
  box.submit(0.0);
  const PoolStart first = box.last.starts.at(0);
  std::vector<JobId> jobs;
  for (int job = 0; job < 4; ++job) jobs.push_back(box.submit(0.0));
  const PoolStart batch = box.finish(1.0, first).starts.at(0);
  ASSERT_EQ(batch.jobs, jobs);
  (void)box.pool.retire(1.0, 1);
  (void)box.pool.restore(1.0, 0);
  const PoolDecisions moved = box.pool.withdraw(1.0, batch.run);
  ASSERT_EQ(devices_of(moved), (Devices{0}));
  EXPECT_EQ(moved.starts[0].jobs, jobs) << "the whole batch, as before";
  const PoolDecisions less = box.pool.withdraw(1.0, moved.starts[0].run, jobs[1]);
  EXPECT_EQ(less.ends.at(0).job, jobs[1]);
  EXPECT_EQ(less.ends.at(0).reason, PoolReason::on_request);
  EXPECT_EQ(less.starts.at(0).jobs, (Jobs{jobs[0], jobs[2]}));
  EXPECT_THROW((void)box.pool.withdraw(1.0, batch.run), InvalidArgument);
}

TEST(PoolJobs, TakesAGangBackAndKeepsItsPlace) {
  Box box({1.0, 1.0});
  const JobId gang = box.submit(0.0, {.gang = 2});
  const PoolStart start = box.last.starts.at(0);
  const JobId later = box.submit(0.5);
  (void)box.pool.retire(1.0, 1);
  EXPECT_EQ(box.pool.withdraw(1.0, start.run).starts.at(0).jobs, (Jobs{later})) << "the gang waits for d1";
  EXPECT_EQ(box.pool.waiting(), 1);
  (void)gang;
}

TEST(PoolJobs, MovesWhatIsBoundToARetiredDevice) {
  Box box({1.0, 1.0}, {.placement = Placement::round_robin});
  std::vector<PoolStart> running;
  for (int job = 0; job < 4; ++job) {
    box.submit(0.0);
    running.insert(running.end(), box.last.starts.begin(), box.last.starts.end());
  }
  (void)box.pool.retire(0.0, 0);
  EXPECT_TRUE(box.finish(1.0, running.at(0)).starts.empty());
  for (int rest = 0; rest < 2; ++rest) {
    running[1] = box.finish(1.0, running[1]).starts.at(0);
    EXPECT_EQ(running[1].devices, (Devices{1}));
  }
  (void)box.pool.restore(2.0, 0);
  box.submit(2.0);
  EXPECT_EQ(devices_of(box.last), (Devices{0}));
}

TEST(PoolJobs, KeepsFillingABatchForItsMaxDelay) {
  Box box({1.0}, {}, {.name = "work", .sizes = {1, 2, 4}, .max_delay_seconds = 0.5});
  box.submit(0.0);
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.last.declines.at(0).reason, PoolReason::filling);
  EXPECT_EQ(box.last.wake_seconds, 0.5);
  box.submit(0.1);
  box.submit(0.2);
  box.submit(0.3);
  EXPECT_EQ(box.last.starts.at(0).jobs.size(), 4U);  // full
  Box alone({1.0}, {}, {.name = "work", .sizes = {1, 2, 4}, .max_delay_seconds = 0.5});
  alone.submit(0.0);
  EXPECT_EQ(alone.pool.tick(0.5).starts.at(0).jobs.size(), 1U);
}

TEST(PoolJobs, RunsAJobOnlyOnDevicesThatItAccepts) {
  PoolState pool;
  const std::size_t kind = pool.add_kind({.name = "work"});
  (void)pool.add_device(0.0, {.name = "host:0", .device_class = "cpu", .labels = {"host"}});
  (void)pool.add_device(0.0, {.name = "cuda:0", .device_class = "H100", .labels = {"cuda"}});
  const std::size_t cuda = pool.add_need({.labels = {"cuda"}});
  const std::size_t large =
      pool.add_need({.accepts = [](const PoolDevice& device) { return device.device_class == "B200"; }});
  JobId id{};
  EXPECT_EQ(devices_of(pool.submit(0.0, {.kind = kind, .need = cuda}, id)), (Devices{1}));
  EXPECT_EQ(pool.submit(0.0, {.kind = kind, .need = large}, id).ends.at(0).reason, PoolReason::no_device);
  EXPECT_EQ(pool.submit(0.0, {.kind = kind, .gang = 3}, id).ends.at(0).reason, PoolReason::no_device);
  EXPECT_TRUE(pool.submit(0.0, {.kind = kind, .need = cuda}, id).starts.empty());
  (void)pool.add_device(0.0, {.name = "cuda:1", .device_class = "B200", .labels = {"cuda"}});
  EXPECT_EQ(pool.waiting(), 0) << "the device that was added took it";
}

TEST(PoolJobs, EvictsTheModelThatIsCheapestToReloadForItsBytes) {
  PoolState pool({.placement = Placement::any});
  (void)pool.add_device(0.0, {.name = "cuda:0", .device_class = "a", .memory_bytes = 10.0});
  const auto kind = [&](const std::string& name, double bytes, double reload) {
    return pool.add_kind({.name = name, .model = name, .resident_bytes = bytes, .reload_seconds = reload});
  };
  const std::size_t dear = kind("dear", 4.0, 4.0);
  const std::size_t cheap = kind("cheap", 4.0, 1.0);
  const std::size_t third = kind("third", 4.0, 2.0);
  JobId id{};
  const auto run = [&](std::size_t one) {
    const PoolStart start = pool.submit(0.0, {.kind = one}, id).starts.at(0);
    (void)pool.finish(0.0, start.run, RunResult::completed, 1.0);
    return start;
  };
  EXPECT_EQ(run(cheap).load_seconds, 1.0);
  EXPECT_EQ(run(dear).load_seconds, 4.0);
  EXPECT_EQ(run(cheap).load_seconds, 0.0);
  const PoolStart start = run(third);
  ASSERT_EQ(start.evict.size(), 1U);
  EXPECT_EQ(start.evict[0].model, "cheap");
  EXPECT_TRUE(pool.resident(0, "dear"));
  EXPECT_EQ(pool.used_bytes(0), 8.0);
  EXPECT_EQ(pool.submit(0.0, {.kind = kind("huge", 11.0, 1.0)}, id).ends.at(0).reason, PoolReason::no_device);
}

TEST(PoolJobs, EvictsByTheSecondsThatLoadsHaveTaken) {
  PoolState pool({.placement = Placement::any});
  (void)pool.add_device(0.0, {.name = "cuda:0", .device_class = "a", .memory_bytes = 10.0});
  const auto kind = [&](const std::string& name, const std::string& model) {
    return pool.add_kind({.name = name, .model = model, .resident_bytes = 4.0});
  };
  JobId id{};
  const auto run = [&](std::size_t one, double load) {
    const PoolStart start = pool.submit(0.0, {.kind = one}, id).starts.at(0);
    if (load > 0.0) (void)pool.loaded(0.0, one, load);
    (void)pool.finish(0.0, start.run, RunResult::completed, 1.0);
    return start;
  };
  const std::size_t dear = kind("dear", "a");
  const std::size_t cheap = kind("cheap", "b");
  (void)run(dear, 4.0);
  (void)run(cheap, 1.0);
  (void)run(dear, 0.0);
  (void)run(cheap, 0.0);  // they have their value from now on
  (void)kind("the same model for another shape", "a");
  ASSERT_EQ(run(kind("third", "c"), 2.0).evict.size(), 1U);
  EXPECT_TRUE(pool.resident(0, "a"));
  EXPECT_EQ(run(cheap, 0.0).load_seconds, 1.0);
  EXPECT_THROW((void)pool.loaded(0.0, cheap, -1.0), InvalidArgument);
  EXPECT_THROW((void)pool.loaded(0.0, pool.add_kind({.name = "no model"}), 1.0), InvalidArgument);
}

TEST(PoolJobs, ThatAreGivenUpFailAndRunNowhereAgain) {
  Box box({1.0, 1.0}, {}, {.name = "work", .sizes = {1, 2, 4}, .idempotent = true});
  const JobId first = box.submit(0.0);
  const PoolStart start = box.last.starts.at(0);
  const JobId after = box.submit(0.0, {.after = {first}});
  box.finish(1.0, start, RunResult::given_up);
  ASSERT_EQ(box.last.ends.size(), 2U);
  EXPECT_EQ(box.last.ends[0].job, first);
  EXPECT_EQ(box.last.ends[0].outcome, JobOutcome::failed);
  EXPECT_EQ(box.last.ends[1].job, after);
  EXPECT_EQ(box.last.ends[1].outcome, JobOutcome::cancelled);
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_TRUE(box.pool.idle(0));
}

TEST(PoolJobs, CapsBatchesByMemory) {
  PoolState pool({.memory_margin_bytes = 1.0});
  (void)pool.add_device(0.0, {.name = "cuda:0", .device_class = "a", .memory_bytes = 10.0});
  const std::size_t kind = pool.add_kind({.name = "work",
                                          .sizes = {1, 2, 4, 8},
                                          .model = "m",
                                          .resident_bytes = 4.0,
                                          .peak_bytes = 1.0,
                                          .peak_bytes_per_item = 1.0});
  EXPECT_EQ(pool.largest_batch(kind, 0), 4);
}

TEST(PoolJobs, IsAValue) {
  Box box({1.0});
  box.submit(0.0);
  const PoolStart start = box.last.starts.at(0);
  const JobId waits = box.submit(0.0);
  PoolState copy = box.pool;
  EXPECT_EQ(box.finish(1.0, start).starts.at(0).jobs, (Jobs{waits}));
  EXPECT_EQ(copy.waiting(), 1);
  EXPECT_EQ(copy.finish(1.0, start.run, RunResult::completed, 1.0).starts.at(0).jobs, (Jobs{waits}));
}

TEST(PoolJobs, RefusesWhatMakesNoSense) {
  Box box({1.0});
  EXPECT_THROW(box.submit(0.0, {.kind = 7}), InvalidArgument);
  EXPECT_THROW(box.submit(0.0, {.need = 7}), InvalidArgument);
  EXPECT_THROW(box.submit(0.0, {.deadline_seconds = 0.0}), InvalidArgument);
  EXPECT_THROW(box.submit(0.0, {.deadline_seconds = std::nan("")}), InvalidArgument);
  EXPECT_THROW(box.submit(0.0, {.not_before_seconds = std::numeric_limits<double>::infinity()}), InvalidArgument);
  EXPECT_THROW(box.submit(0.0, {.gang = 0}), InvalidArgument);
  EXPECT_THROW((void)box.pool.finish(0.0, RunId{9}, RunResult::completed, 1.0), InvalidArgument);
  EXPECT_THROW((void)box.pool.add_kind({.sizes = {2, 4}}), InvalidArgument);
  EXPECT_THROW((void)box.pool.add_kind({.sizes = {1, 1}}), InvalidArgument);
  EXPECT_THROW((void)box.pool.retire(0.0, 3), InvalidArgument);
  (void)box.pool.tick(5.0);
  EXPECT_THROW((void)box.pool.tick(4.0), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan::testing

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

TEST(PoolTenants, MayUseSoManyDevicesAtOnce) {
  Box box({1.0, 1.0, 1.0}, {.placement = Placement::any});
  const std::size_t a = box.pool.add_tenant({.name = "a", .devices = 1});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  const JobId first = box.submit(0.0, {.tenant = a});
  const JobId second = box.submit(0.0, {.tenant = a});
  EXPECT_EQ(box.last.declines.at(0).reason, PoolReason::quota);
  EXPECT_EQ(box.pool.describe(box.last.declines.at(0)),
            "d1 leaves 'work' waiting: their tenants use as much as their quotas allow");
  (void)box.submit(0.0, {.tenant = b});
  EXPECT_EQ(devices_of(box.last), Devices{1});
  (void)box.submit(0.0, {.priority = Priority::background, .tenant = b});
  EXPECT_EQ(devices_of(box.last), Devices{2}) << "what a quota holds does not wait for the device";
  PoolDecisions decided = box.pool.finish(1.0, RunId{std::uint64_t{1} << 20}, RunResult::completed, 1.0);
  EXPECT_EQ(decided.ends.at(0).job, first);
  EXPECT_EQ(decided.starts.at(0).jobs, Jobs{second});
  (void)box.submit(1.0, {.gang = 2, .tenant = a});
  EXPECT_EQ(box.last.ends.at(0).reason, PoolReason::quota);
  EXPECT_EQ(box.last.ends.at(0).outcome, JobOutcome::rejected);
}

TEST(PoolTenants, MayUseSoManyBytesAtOnce) {
  Box box({1.0, 1.0}, {.placement = Placement::any},
          {.name = "work", .sizes = {1, 2, 4}, .peak_bytes = 1.0, .peak_bytes_per_item = 1.0});
  const std::size_t big = box.pool.add_kind({.name = "big", .peak_bytes = 6.0});
  const std::size_t a = box.pool.add_tenant({.name = "a", .memory_bytes = 4.0});
  (void)box.pool.retire(0.0, 0);
  (void)box.pool.retire(0.0, 1);
  Jobs jobs;
  for (int k = 0; k < 4; ++k) jobs.push_back(box.submit(0.0, {.tenant = a}));
  const JobId other = box.submit(0.0);
  // Three of `a` in a batch take 4 bytes. One more elsewhere would take another 2.
  box.last = box.pool.restore(0.0, 0);
  EXPECT_EQ(box.last.starts.at(0).jobs, (Jobs{jobs[0], other, jobs[1], jobs[2]}));
  box.last = box.pool.restore(0.0, 1);
  EXPECT_TRUE(box.last.starts.empty());
  (void)box.submit(0.0, {.kind = big, .tenant = a});
  EXPECT_EQ(box.last.ends.at(0).reason, PoolReason::quota);
}

TEST(PoolTenants, DoNotOvertakeWhatTheirQuotaHasHeldForLong) {
  Box box({1.0, 1.0, 1.0}, {.placement = Placement::any}, {.name = "small", .peak_bytes = 2.0});
  const std::size_t large = box.pool.add_kind({.name = "large", .peak_bytes = 4.0});
  const std::size_t a = box.pool.add_tenant({.name = "a", .memory_bytes = 5.0});
  (void)box.submit(0.0, {.tenant = a});
  const PoolStart first = box.last.starts.at(0);
  const JobId held = box.submit(0.0, {.kind = large, .tenant = a});
  EXPECT_TRUE(box.last.starts.empty());
  (void)box.submit(0.5, {.tenant = a});
  ASSERT_EQ(box.last.starts.size(), 1) << "its patience is not over";
  const PoolStart second = box.last.starts.at(0);
  const PoolDecisions& decided = box.finish(1.5, first);
  EXPECT_TRUE(decided.starts.empty());
  const JobId later = box.submit(1.6, {.tenant = a});
  EXPECT_TRUE(box.last.starts.empty()) << "its patience is over";
  EXPECT_EQ(box.finish(2.0, second).starts.at(0).jobs, Jobs{held});
  EXPECT_EQ(box.finish(3.0, box.last.starts.at(0)).starts.at(0).jobs, Jobs{later});
}

TEST(PoolTenants, GangOfATenantAtItsQuotaReservesNothing) {
  Box box({1.0, 1.0}, {.placement = Placement::any});
  const std::size_t a = box.pool.add_tenant({.name = "a", .devices = 2});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = a});
  const PoolStart first = box.last.starts.at(0);
  const JobId gang = box.submit(0.0, {.gang = 2, .tenant = a});
  (void)box.submit(0.0, {.tenant = b});
  ASSERT_EQ(devices_of(box.last), Devices{1});
  const PoolStart second = box.last.starts.at(0);
  (void)box.finish(1.0, second);
  EXPECT_EQ(box.finish(1.0, first).starts.at(0).jobs, Jobs{gang});
}

TEST(PoolTenants, UseTheMemoryOfEachDeviceOfAGang) {
  Box box({1.0, 1.0, 1.0, 1.0}, {.placement = Placement::any}, {.name = "work", .peak_bytes = 2.0});
  const std::size_t a = box.pool.add_tenant({.name = "a", .memory_bytes = 7.0});
  (void)box.submit(0.0, {.gang = 2, .tenant = a});
  EXPECT_EQ(box.pool.tenants()[a].memory_bytes, 4.0);
  EXPECT_EQ(box.pool.tenants()[a].devices, 2);
  (void)box.submit(0.0, {.gang = 2, .tenant = a});
  EXPECT_TRUE(box.last.starts.empty());
  (void)box.submit(0.0, {.tenant = a});
  EXPECT_EQ(box.last.starts.size(), 1);
  (void)box.submit(0.0, {.gang = 4, .tenant = a});
  EXPECT_EQ(box.last.ends.at(0).reason, PoolReason::quota);
}

// One tenant has a fast device alone, and its tags are far ahead. Two others share a slow one.

// With quotas everything ends, and nothing exceeds them.
TEST(PoolTenants, AllEndWithinTheirQuotas) {
  std::int64_t declined = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Draws draws(seed);
    PoolState pool({.placement = draws.chance(0.5) ? Placement::any : Placement::automatic});
    const std::size_t devices = draws.count(2, 4);
    for (std::size_t d = 0; d < devices; ++d) (void)pool.add_device(0.0, {.name = "d"});
    for (int k = 0; k < 3; ++k) {
      PoolKind kind{.name = "k", .queue_limit = 1000, .peak_bytes = 0.5 * static_cast<double>(draws.integer(0, 4))};
      if (draws.chance(0.5)) kind.sizes = {1, 2, 4};
      kind.peak_bytes_per_item = 0.1 * static_cast<double>(draws.integer(0, 10));
      (void)pool.add_kind(kind);
    }
    for (int t = 0; t < 3; ++t) {
      (void)pool.add_tenant({.name = "t",
                             .weight = draws.real(0.5, 2.0),
                             .devices = draws.integer(1, 3),
                             .memory_bytes = draws.chance(0.5) ? draws.real(1.0, 6.0) : kNoLimit});
    }
    std::set<JobId> waiting;
    std::vector<RunId> runs;
    double now = 0.0;
    double wake = kNoLimit;
    const auto follow = [&](const PoolDecisions& decided) {
      wake = decided.wake_seconds;
      for (const PoolEnd& end : decided.ends) waiting.erase(end.job);
      for (const PoolStart& start : decided.starts) runs.push_back(start.run);
      for (const PoolDecline& one : decided.declines) declined += one.reason == PoolReason::quota ? 1 : 0;
      for (const PoolTenantUse& one : pool.tenants()) {
        ASSERT_LE(one.devices, one.tenant.devices) << "seed " << seed;
        ASSERT_LE(one.memory_bytes, one.tenant.memory_bytes * (1.0 + 1e-9)) << "seed " << seed;
      }
    };
    for (int event = 0; event < 300 || !runs.empty() || wake < kNoLimit; ++event) {
      now += draws.real(0.0, 0.3);
      if (event < 200 && draws.chance(0.6)) {
        PoolJob job{.kind = draws.count(0, 2), .priority = static_cast<Priority>(draws.count(0, 3))};
        job.tenant = draws.count(0, 3);
        if (draws.chance(0.2)) job.gang = 2;
        if (draws.chance(0.2)) job.deadline_seconds = draws.real(1.0, 30.0);
        JobId id{};
        const PoolDecisions decided = pool.submit(now, job, id);
        waiting.insert(id);
        follow(decided);
      } else if (!runs.empty()) {
        const auto run = runs.begin() + draws.integer(0, std::ssize(runs) - 1);
        const RunId id = *run;
        runs.erase(run);
        follow(pool.finish(now, id, RunResult::completed, draws.real(0.0, 2.0)));
      } else {
        now = wake < kNoLimit ? std::max(now, wake) : now;
        follow(pool.tick(now));
      }
    }
    ASSERT_TRUE(waiting.empty()) << "seed " << seed << ", " << waiting.size() << " wait for ever";
    ASSERT_EQ(pool.waiting(), 0);
    for (const PoolTenantUse& one : pool.tenants()) ASSERT_EQ(one.waiting, 0) << "seed " << seed;
  }
  EXPECT_GT(declined, 1000);
}

}  // namespace
}  // namespace paceline::plan::testing

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

#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

TEST(PoolTenants, ShareABatch) {
  Box box({1.0}, {.placement = Placement::any}, {.name = "work", .sizes = {1, 2, 4}});
  const std::size_t a = box.pool.add_tenant({.name = "a", .weight = 3.0});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0);
  const PoolStart first = box.last.starts.at(0);
  Jobs of_a;
  for (int k = 0; k < 6; ++k) of_a.push_back(box.submit(0.0, {.tenant = a}));
  const JobId of_b = box.submit(0.1, {.tenant = b});
  // Three of `a` for one of `b`: tags 0, 1/3, 2/3 and 0.
  EXPECT_EQ(box.finish(1.0, first).starts.at(0).jobs, (Jobs{of_a[0], of_b, of_a[1], of_a[2]}));
  std::vector<PoolTenantUse> use = box.pool.tenants();
  EXPECT_EQ(use[a].served, 0.0) << "it has only begun";
  EXPECT_EQ(use[a].waiting, 3);
  EXPECT_EQ(use[b].waiting, 0);
  EXPECT_EQ(use[b].devices, 1);
  (void)box.finish(2.0, box.last.starts.at(0));
  use = box.pool.tenants();
  EXPECT_EQ(use[a].served, 3.0);
  EXPECT_EQ(use[b].served, 1.0);
  EXPECT_EQ(use[b].devices, 0);
}

TEST(PoolTenants, AreNotChargedForWhatIsCancelledOrTakenBack) {
  Box box({1.0}, {.placement = Placement::any});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = a});
  const PoolStart first = box.last.starts.at(0);
  for (int k = 0; k < 100; ++k) {
    bool cancelled = false;
    (void)box.pool.cancel(0.0, box.submit(0.0, {.tenant = a}), cancelled);
    EXPECT_TRUE(cancelled);
  }
  (void)box.pool.withdraw(0.0, first.run, first.jobs.front());
  EXPECT_EQ(box.pool.tenants()[a].served, 0.0);
  (void)box.submit(0.0, {.tenant = b});
  const PoolStart second = box.last.starts.at(0);
  const JobId of_b = box.submit(0.1, {.tenant = b});
  const JobId of_a = box.submit(0.2, {.tenant = a});
  // Otherwise both would have been charged once, and the earlier job would be next.
  EXPECT_EQ(box.finish(1.0, second).starts.at(0).jobs, Jobs{of_a});
  EXPECT_EQ(box.finish(2.0, box.last.starts.at(0)).starts.at(0).jobs, Jobs{of_b});
}

TEST(PoolTenants, AreChargedOnceForWhatBeginsAgain) {
  Box box({1.0}, {.placement = Placement::any});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = b});
  const PoolStart first = box.last.starts.at(0);
  const JobId of_a = box.submit(0.1, {.tenant = a});
  const JobId of_b = box.submit(0.1, {.tenant = b});
  const JobId last = box.submit(0.1, {.tenant = a});
  const PoolStart again = box.pool.withdraw(0.3, first.run).starts.at(0);
  EXPECT_EQ(again.jobs, first.jobs);
  Jobs order;
  order.push_back(box.finish(1.0, again).starts.at(0).jobs.front());
  EXPECT_EQ(box.pool.tenants()[b].served, 1.0);
  for (double now = 2.0; order.size() < 3; now += 1.0)
    order.push_back(box.finish(now, box.last.starts.at(0)).starts.at(0).jobs.front());
  // After the first of `a` both have been charged 1. Charged 2, `b` would be last.
  EXPECT_EQ(order, (Jobs{of_a, of_b, last}));
}

TEST(PoolTenants, AreChargedForEachDeviceOfAGang) {
  Box box({1.0, 1.0});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  double now = 0.0;
  const auto run = [&](PoolJob job) {
    (void)box.submit(now, job);
    (void)box.finish(now += 1.0, box.last.starts.at(0));
    return box.pool.tenants()[a].served;
  };
  EXPECT_EQ(run({.gang = 2, .tenant = a}), 2.0);
  EXPECT_EQ(run({.tenant = a}), 3.0);
  EXPECT_EQ(run({.gang = 2, .tenant = a, .charge = 5.0}), 8.0) << "what is said is for all devices";
}

TEST(PoolTenants, LeaveOtherPrioritiesTheirTurns) {
  Box box({1.0}, {.placement = Placement::any});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = a});
  PoolStart run = box.last.starts.at(0);
  const Jobs of_a{box.submit(0.0, {.tenant = a}), box.submit(0.0, {.tenant = a}), box.submit(0.0, {.tenant = a})};
  const JobId of_b = box.submit(0.5, {.tenant = b});
  const JobId urgent = box.submit(1.2, {.priority = Priority::interactive, .tenant = b});
  // Normal jobs have three turns of before 1.3, the fourth is of 1.5, whoever takes them.
  Jobs order;
  for (double now = 2.0; order.size() < 5; now += 1.0) {
    run = box.finish(now, run).starts.at(0);
    order.push_back(run.jobs.front());
  }
  EXPECT_EQ(order, (Jobs{of_b, of_a[0], of_a[1], urgent, of_a[2]}));
}

TEST(PoolTenants, FillTheQueueForThemselvesOnly) {
  Box box({1.0}, {.placement = Placement::any}, {.name = "work", .queue_limit = 2});
  const auto refused = [&] { return !box.last.ends.empty() && box.last.ends.at(0).reason == PoolReason::queue_full; };
  for (int k = 0; k < 3; ++k) (void)box.submit(0.0);
  EXPECT_FALSE(box.pool.has_room(0));
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  EXPECT_FALSE(box.pool.has_room(0));
  (void)box.submit(0.0);
  EXPECT_TRUE(refused());
  EXPECT_TRUE(box.pool.has_room(0, a));
  (void)box.submit(0.0, {.tenant = a});
  const JobId second = box.submit(0.0, {.tenant = a});
  EXPECT_FALSE(refused());
  (void)box.submit(0.0, {.tenant = a});
  EXPECT_TRUE(refused());
  bool cancelled = false;
  (void)box.pool.cancel(0.0, second, cancelled);
  EXPECT_TRUE(box.pool.has_room(0, a));
}

TEST(PoolTenants, GetTheirTurnBackWithAJobThatIsTakenBack) {
  Box box({1.0}, {.placement = Placement::any});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = a});
  const PoolStart first = box.last.starts.at(0);
  (void)box.submit(0.0, {.tenant = a});
  const JobId of_b = box.submit(0.5, {.tenant = b});
  (void)box.submit(1.2, {.priority = Priority::interactive});
  const PoolStart second = box.finish(2.0, first).starts.at(0);
  EXPECT_EQ(second.jobs, Jobs{of_b});
  // It had the turn of 1.0, before the interactive job's of 1.3. Its own was of 1.5.
  EXPECT_EQ(box.pool.withdraw(2.0, second.run).starts.at(0).jobs, Jobs{of_b});
}

TEST(PoolTenants, KeepTheirSharesWhateverOthersAreServedElsewhere) {
  for (const bool overlap : {false, true}) {
    Box box({1.0, 1.0, 1.0}, {.placement = Placement::any}, {.name = "work", .queue_limit = 1000});
    const std::size_t slow = box.pool.add_need({.labels = {"d0"}});
    const std::size_t same = box.pool.add_need({.labels = {"class 0"}});  // the same device, by another name
    const std::size_t fast =
        box.pool.add_need({.accepts = [&](const PoolDevice& one) { return one.name != (overlap ? "" : "d0"); }});
    const std::size_t a = box.pool.add_tenant({.name = "a"});
    const std::size_t b = box.pool.add_tenant({.name = "b", .weight = 3.0});
    const std::size_t c = box.pool.add_tenant({.name = "c"});
    std::vector<PoolStart> runs(3);  // by device
    std::vector<std::size_t> tenant_of;
    std::vector<JobId> ids;
    const auto submit = [&](const PoolJob& job) {
      ids.push_back(box.submit(0.0, job));
      tenant_of.push_back(job.tenant);
      for (const PoolStart& one : box.last.starts) runs[one.devices.front()] = one;
    };
    for (int k = 0; k < 3; ++k) submit({});
    for (int k = 0; k < 200; ++k) submit({.need = fast, .tenant = a, .charge = 1000.0});
    for (int k = 0; k < 60; ++k) {
      submit({.need = slow, .tenant = b});
      submit({.need = same, .tenant = c});
    }
    std::vector<int> served(4, 0);
    for (int k = 0; served[b] + served[c] < 40; ++k) {
      const auto d = static_cast<std::size_t>(k % 3);
      (void)box.finish(1.0 + k, runs[d]);
      for (const PoolStart& one : box.last.starts) {
        runs[one.devices.front()] = one;
        const auto place = std::ranges::find(ids, one.jobs.front()) - ids.begin();
        ++served[tenant_of[static_cast<std::size_t>(place)]];
      }
      ASSERT_LT(k, 400);
    }
    EXPECT_GT(served[a], 20);
    EXPECT_NEAR(served[b], 30, 1) << "overlap " << overlap;
  }
}

// Jobs for any device and jobs for this one share a queue, until there is another device.
TEST(PoolTenants, KeepTheirTurnsWhenADeviceTellsNeedsApart) {
  Box box({1.0}, {.placement = Placement::any}, {.name = "work", .queue_limit = 100});
  const std::size_t need = box.pool.add_need({.labels = {"d0"}});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = a, .charge = 3.5});
  PoolStart run = box.last.starts.at(0);
  (void)box.pool.add_device(0.0, {.name = "d1"});
  (void)box.pool.retire(0.0, 1);
  const JobId of_a = box.submit(0.0, {.need = need, .tenant = a});
  Jobs expected;
  for (int k = 0; k < 4; ++k) expected.push_back(box.submit(0.1, {.need = need, .tenant = b}));
  expected.push_back(of_a);
  Jobs order;
  for (double now = 1.0; order.size() < 5; now += 1.0) {
    run = box.finish(now, run).starts.at(0);
    order.push_back(run.jobs.front());
  }
  EXPECT_EQ(order, expected);
}

TEST(PoolTenants, DoNotOvertakeWhatWaitsForADeviceOfOthers) {
  Box box({1.0, 1.0}, {.placement = Placement::any}, {.name = "work", .queue_limit = 100});
  const std::size_t host = box.pool.add_need({.labels = {"d0"}});
  const std::size_t gpu = box.pool.add_need({.labels = {"d1"}});
  const std::size_t a = box.pool.add_tenant({.name = "a", .devices = 1});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.need = gpu, .tenant = b});
  PoolStart on_gpu = box.last.starts.at(0);
  (void)box.submit(0.0, {.need = host, .tenant = a});
  const PoolStart on_host = box.last.starts.at(0);
  const JobId held = box.submit(0.0, {.need = gpu, .tenant = a});
  Jobs later;
  for (int k = 0; k < 5; ++k) {
    later.push_back(box.submit(0.1, {.need = host, .tenant = a}));
    (void)box.submit(0.1, {.need = gpu, .tenant = b});
  }
  // Its patience is over. It would fit, but its device is busy.
  EXPECT_TRUE(box.finish(5.0, on_host).starts.empty());
  // Unless the device for it is retired.
  EXPECT_EQ(box.pool.retire(5.5, 1).starts.at(0).jobs, Jobs{later[0]});
  EXPECT_TRUE(box.pool.restore(5.6, 1).starts.empty());
  EXPECT_TRUE(box.pool.finish(5.7, RunId{std::uint64_t{3} << 20}, RunResult::completed, 0.1).starts.empty());
  EXPECT_EQ(box.finish(6.0, on_gpu).starts.at(0).jobs, Jobs{held});
  on_gpu = box.last.starts.at(0);
  const PoolDecisions& after = box.finish(7.0, on_gpu);
  ASSERT_EQ(after.starts.size(), 2);
  EXPECT_NE(std::ranges::find(after.starts, Jobs{later[1]}, &PoolStart::jobs), after.starts.end());
}

// A quota of two devices has room for others beside the one that waits.
TEST(PoolTenants, UseWhatTheirQuotaHasBesideWhatItHolds) {
  Box box({1.0, 1.0, 1.0}, {.placement = Placement::any});
  const std::size_t host = box.pool.add_need({.accepts = [](const PoolDevice& one) { return one.name != "d2"; }});
  const std::size_t gpu = box.pool.add_need({.labels = {"d2"}});
  const std::size_t a = box.pool.add_tenant({.name = "a", .devices = 2});
  (void)box.submit(0.0, {.need = gpu});
  const PoolStart on_gpu = box.last.starts.at(0);
  const JobId held = box.submit(0.0, {.need = gpu, .tenant = a});
  (void)box.submit(5.0, {.need = host, .tenant = a});
  EXPECT_EQ(box.last.starts.size(), 1);
  (void)box.submit(5.0, {.need = host, .tenant = a});
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.finish(6.0, on_gpu).starts.at(0).jobs, Jobs{held});
}

// While a job of `a` runs, in vain for forty times, both go on to start others.
TEST(PoolTenants, LoseNothingByRunningAgain) {
  Box box({1.0, 1.0}, {.placement = Placement::any}, {.name = "work", .idempotent = true, .queue_limit = 1000});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  const JobId first = box.submit(0.0, {.tenant = a, .charge = 10.0});
  std::vector<PoolStart> runs(2);  // by device
  runs[0] = box.last.starts.at(0);
  (void)box.submit(0.0, {.tenant = b});
  runs[1] = box.last.starts.at(0);
  for (int k = 0; k < 60; ++k) (void)box.submit(0.1, {.tenant = a, .charge = 10.0});
  for (int k = 0; k < 600; ++k) (void)box.submit(0.2, {.tenant = b});
  int lost = 0;
  for (int k = 1; k < 300; ++k) {
    for (PoolStart& run : runs) {
      const bool again = run.jobs.front() == first && lost < 40;
      if (again && k % 7 != 0) continue;
      lost += again ? 1 : 0;
      run = box.finish(k, run, again ? RunResult::device_lost : RunResult::completed).starts.at(0);
    }
  }
  EXPECT_EQ(lost, 40);
  const std::vector<PoolTenantUse> use = box.pool.tenants();
  EXPECT_NEAR(use[a].served, use[b].served, 22.0) << "one start each, and what runs now";
}

TEST(PoolTenants, AreChargedWhatTheirJobsSaidBeforeThereWereTenants) {
  Box box({1.0}, {.placement = Placement::any}, {.name = "work", .queue_limit = 100});
  (void)box.submit(0.0);
  const PoolStart run = box.last.starts.at(0);
  Jobs unnamed;
  for (int k = 0; k < 3; ++k) unnamed.push_back(box.submit(0.0, {.charge = 30.0}));
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  Jobs of_a;
  for (int k = 0; k < 5; ++k) of_a.push_back(box.submit(0.1, {.tenant = a}));
  Jobs order;
  order.push_back(box.finish(1.0, run).starts.at(0).jobs.front());
  for (double now = 2.0; order.size() < 6; now += 1.0)
    order.push_back(box.finish(now, box.last.starts.at(0)).starts.at(0).jobs.front());
  EXPECT_EQ(order, (Jobs{unnamed[0], of_a[0], of_a[1], of_a[2], of_a[3], of_a[4]}));
  EXPECT_EQ(box.pool.tenants()[0].served, 30.0);
}

TEST(PoolTenants, OweForDeadlinesAlsoOnceTheirOtherJobsAreCancelled) {
  Box box({1.0}, {.placement = Placement::any, .patience = {1e3, 2e3, 3e3, 4e3}}, {.name = "work", .queue_limit = 100});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = b});
  PoolStart run = box.last.starts.at(0);
  double now = 1.0;
  const auto next = [&] { return (run = box.finish(now += 1.0, run).starts.at(0)).jobs.front(); };
  Jobs of_b;
  for (int k = 0; k < 12; ++k) of_b.push_back(box.submit(1.0, {.tenant = b}));
  for (int k = 0; k < 5; ++k) EXPECT_EQ(next(), of_b[static_cast<std::size_t>(k)]);
  // The virtual time is 5. A job with a deadline is charged 4, while another one of `a` waits.
  const JobId other = box.submit(now, {.tenant = a});
  const JobId timed = box.submit(now, {.deadline_seconds = 100.0, .tenant = a, .charge = 4.0});
  EXPECT_EQ(next(), timed);
  bool cancelled = false;
  (void)box.pool.cancel(now, other, cancelled);
  EXPECT_TRUE(cancelled);
  const JobId late = box.submit(now, {.tenant = a});
  // So the next one has the tag 9: after those of `b` with 6, 7 and 8.
  for (int k = 5; k < 8; ++k) EXPECT_EQ(next(), of_b[static_cast<std::size_t>(k)]);
  const Jobs two{next(), next()};
  EXPECT_NE(std::ranges::find(two, late), two.end());
}

// A job with a deadline was charged to what comes after it, and was taken back.
TEST(PoolTenants, AreNotChargedForADeadlineThatIsTakenBack) {
  Box box({1.0}, {.placement = Placement::any, .patience = {1e3, 2e3, 3e3, 4e3}});
  const std::size_t a = box.pool.add_tenant({.name = "a"});
  const std::size_t b = box.pool.add_tenant({.name = "b"});
  (void)box.submit(0.0, {.tenant = b});
  const PoolStart first = box.last.starts.at(0);
  const Jobs of_b{box.submit(0.0, {.tenant = b}), box.submit(0.0, {.tenant = b}), box.submit(0.0, {.tenant = b})};
  const Jobs of_a{box.submit(0.1, {.tenant = a}), box.submit(0.1, {.tenant = a})};
  const JobId timed = box.submit(0.1, {.deadline_seconds = 100.0, .tenant = a, .charge = 9.0});
  const PoolStart start = box.finish(1.0, first).starts.at(0);
  ASSERT_EQ(start.jobs, Jobs{timed});
  PoolStart run = box.pool.withdraw(1.0, start.run, timed).starts.at(0);
  Jobs order = run.jobs;
  for (double now = 2.0; order.size() < 4; now += 1.0) {
    run = box.finish(now, run).starts.at(0);
    order.push_back(run.jobs.front());
  }
  EXPECT_EQ(order, (Jobs{of_a[0], of_b[0], of_a[1], of_b[1]}));
}

TEST(PoolTenants, AreRefusedWithWhatCannotBe) {
  PoolState pool;
  EXPECT_THROW((void)pool.add_tenant({.weight = 0.0}), InvalidArgument);
  EXPECT_THROW((void)pool.add_tenant({.weight = std::numeric_limits<double>::infinity()}), InvalidArgument);
  EXPECT_THROW((void)pool.add_tenant({.devices = 0}), InvalidArgument);
  EXPECT_THROW((void)pool.add_tenant({.memory_bytes = 0.0}), InvalidArgument);
  (void)pool.add_kind({.name = "work"});
  JobId id{};
  EXPECT_THROW((void)pool.submit(0.0, {.tenant = 1}, id), InvalidArgument);
  EXPECT_THROW((void)pool.submit(0.0, {.charge = -1.0}, id), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan::testing

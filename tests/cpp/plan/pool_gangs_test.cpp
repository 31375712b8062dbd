// SPDX-License-Identifier: Apache-2.0
//
// Gangs: what is reserved for them, and what may start there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

TEST(PoolGangs, GatherDevicesAndLetOthersStartWhatEndsBefore) {
  Box box({1.0, 1.0, 1.0});
  std::vector<PoolStart> running;
  for (int job = 0; job < 3; ++job) {
    box.submit(0.0);
    running.push_back(box.last.starts.at(0));
  }
  const JobId gang = box.submit(0.1, {.gang = 2});
  const JobId late = box.submit(0.2);
  // Device 0 is free early. The second device of the gang is free at 1.0: a job of a second would be late for it.
  EXPECT_TRUE(box.finish(0.5, running[0]).starts.empty());
  EXPECT_EQ(box.last.declines.at(0).reason, PoolReason::reserved);
  const std::size_t quick = box.pool.add_kind({.name = "quick"});
  for (std::size_t d = 0; d < 3; ++d) (void)box.pool.measure(0.5, d, quick, CostModel::affine(0.0, 0.1), 3);
  const JobId backfill = box.submit(0.5, {.kind = quick});
  ASSERT_EQ(box.last.starts.at(0).jobs, (Jobs{backfill}));
  EXPECT_TRUE(box.finish(0.6, box.last.starts[0]).starts.empty());
  const PoolDecisions& decisions = box.finish(1.0, running[1]);
  ASSERT_EQ(decisions.starts.at(0).jobs, (Jobs{gang}));
  EXPECT_EQ(decisions.starts[0].devices.size(), 2U);
  EXPECT_EQ(box.finish(1.0, running[2]).starts.at(0).jobs, (Jobs{late}));
}

TEST(PoolGangs, LetNothingStartWhoseSecondsNobodyKnows) {
  Box box({1.0, 1.0});
  (void)box.submit(0.0);
  const PoolStart running = box.last.starts.at(0);
  const JobId gang = box.submit(0.0, {.gang = 2});
  const JobId unknown = box.submit(0.0, {.kind = box.pool.add_kind({.name = "unknown"})});
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.last.declines.at(0).reason, PoolReason::reserved);
  ASSERT_EQ(box.finish(1.0, running).starts.at(0).jobs, (Jobs{gang}));
  EXPECT_EQ(box.finish(2.0, box.last.starts[0]).starts.at(0).jobs, (Jobs{unknown}));
}

TEST(PoolGangs, ReserveForTheFirstAlone) {
  Box box({1.0, 1.0, 1.0, 1.0});
  const std::size_t low =
      box.pool.add_need({.accepts = [](const PoolDevice& one) { return one.name == "d0" || one.name == "d1"; }});
  const std::size_t high =
      box.pool.add_need({.accepts = [](const PoolDevice& one) { return one.name == "d2" || one.name == "d3"; }});
  for (const std::size_t need : {low, high}) (void)box.submit(0.0, {.need = need});
  for (const std::size_t need : {low, high}) (void)box.submit(0.0, {.need = need, .gang = 2});
  // One device of each gang is idle. A job that would be late for either starts where nothing is reserved.
  const JobId job = box.submit(0.5);
  ASSERT_EQ(box.last.starts.at(0).jobs, (Jobs{job}));
  EXPECT_EQ(box.last.starts[0].devices, (Devices{3}));
}

TEST(PoolGangs, LeaveOthersWhatIsReserved) {
  Box box({1.0, 1.0, 1.0});
  (void)box.submit(0.0);
  const PoolStart running = box.last.starts.at(0);
  const JobId large = box.submit(0.0, {.gang = 3});
  (void)box.submit(0.0, {.gang = 2});  // two devices are idle
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.finish(1.0, running).starts.at(0).jobs, (Jobs{large}));
}

TEST(PoolGangs, ReserveNothingInTheBackground) {
  Box box({1.0, 1.0});
  (void)box.submit(0.0);
  (void)box.submit(0.0, {.priority = Priority::background, .gang = 2});
  const JobId job = box.submit(0.5, {.priority = Priority::background});
  EXPECT_EQ(box.last.starts.at(0).jobs, (Jobs{job}));
}

// With exact times: once nothing before it waits, a gang starts no later than as many devices would have been free
// then, whatever comes afterwards.
TEST(PoolGangs, AreNotDelayedByWhatComesLater) {
  int held = 0;
  int started = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Draws draws(seed);
    Box box(std::vector<double>(draws.count(2, 5)));
    const std::size_t devices = box.pool.device_count();
    for (std::size_t kind = 0; kind < 3; ++kind) {
      if (kind > 0) (void)box.pool.add_kind({.name = "other"});
      for (std::size_t d = 0; d < devices; ++d)
        (void)box.pool.measure(0.0, d, kind, CostModel::affine(0.0, draws.real(0.2, 3.0)), 3);
    }
    std::map<std::size_t, std::pair<double, PoolStart>> runs;  // by their first device
    std::vector<double> free(devices);
    std::vector<JobId> before;  // that wait, and came before the gang
    std::optional<JobId> gang;
    double promised = std::numeric_limits<double>::infinity();
    std::int64_t size = 0;
    double now = 0.0;
    const auto follow = [&] {
      for (const PoolStart& start : box.last.starts) {
        for (const JobId id : start.jobs) {
          std::erase(before, id);
          if (id != gang) continue;
          ASSERT_LE(now, promised * (1.0 + 1e-9)) << "seed " << seed;
          promised = -1.0;
        }
        for (const std::size_t d : start.devices) free[d] = now + start.predicted_seconds;
        runs[start.devices.front()] = {now + start.predicted_seconds, start};
      }
      for (const PoolDecline& one : box.last.declines) held += one.reason == PoolReason::reserved ? 1 : 0;
      if (!gang || !before.empty() || promised < std::numeric_limits<double>::infinity()) return;
      std::vector<double> sorted = free;
      std::ranges::sort(sorted);
      promised = std::max(now, sorted[static_cast<std::size_t>(size - 1)]);
    };
    for (int event = 0; event < 80 || !runs.empty(); ++event) {
      const double next = now + draws.real(0.0, 0.4);
      const auto first = std::ranges::min_element(runs, {}, [](const auto& run) { return run.second.first; });
      if (first != runs.end() && (event >= 80 || first->second.first <= next)) {
        const auto [end, start] = first->second;
        runs.erase(first);
        now = end;
        box.finish(now, start);
      } else {
        now = next;
        const bool is_gang = !gang && event >= 30;
        if (is_gang) size = draws.integer(2, std::ssize(free));
        const JobId id = box.submit(now, {.kind = draws.count(0, 2), .gang = is_gang ? size : 1});
        if (is_gang) gang = id;
        if (!gang) before.push_back(id);
      }
      follow();
      if (HasFatalFailure()) return;
    }
    started += promised < 0.0 ? 1 : 0;
  }
  EXPECT_EQ(started, 300);
  EXPECT_GT(held, 1000);
}

}  // namespace
}  // namespace paceline::plan::testing

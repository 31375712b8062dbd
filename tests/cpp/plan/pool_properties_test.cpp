// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "pool_script.hpp"
#include "pool_watcher.hpp"

namespace paceline::plan::testing {
namespace {

TEST(PoolProperties, HoldAfterEveryEventOfRandomScripts) {
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    Script script(seed, {});
    ASSERT_EQ(script.run(40), "") << "seed " << seed;
  }
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Script script(seed, {});
    ASSERT_EQ(script.run(1500), "") << "long script, seed " << seed;
  }
}

// The watcher must see each of these in every script in which it was planted.
void expect_noticed(const Fault& fault, const std::vector<std::string>& as) {
  int planted = 0;
  for (std::uint64_t seed = 0; seed < 2000 && planted < 100; ++seed) {
    Script script(seed, fault);
    const std::string problem = script.run(60);
    if (!script.planted()) continue;
    ++planted;
    ASSERT_TRUE(std::ranges::count(as, problem) > 0) << "seed " << seed << ": '" << problem << "'";
  }
  EXPECT_GT(planted, 20);
}

TEST(PoolProperties, NoticeAJobThatEndsTwice) {
  expect_noticed(
      [](const PoolState&, const PoolWatcher&, PoolDecisions& made) {
        if (made.ends.empty()) return false;
        made.ends.push_back(made.ends.front());
        return true;
      },
      {"a job ended twice, or was never submitted"});
}

TEST(PoolProperties, NoticeAJobThatNeverEnds) {
  expect_noticed(
      [](const PoolState&, const PoolWatcher&, PoolDecisions& made) {
        if (made.ends.empty() || made.ends.front().outcome == JobOutcome::completed) return false;
        made.ends.erase(made.ends.begin());
        return true;
      },
      {"the pool counts other waiting jobs", "not in the order of keys",
       "an idle device left a job waiting without a reason that holds", "a job waits for a lost device"});
}

TEST(PoolProperties, NoticeABatchOfTwoKinds) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher&, PoolDecisions& made) {
        if (made.starts.empty() || made.starts.front().devices.size() > 1) return false;
        std::size_t& kind = made.starts.front().kind;
        for (std::size_t other = 0; other < pool.kind_count(); ++other) {
          if (other == kind || pool.kind(other).sizes != pool.kind(kind).sizes) continue;
          kind = other;
          return true;
        }
        return false;
      },
      {"a batch of two kinds"});
}

TEST(PoolProperties, NoticeAJobThatOvertakes) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher& watcher, PoolDecisions& made) {
        const Placement placement = pool.options().placement;
        if (placement != Placement::automatic && placement != Placement::any) return false;
        if (!made.ends.empty() || made.starts.size() != 1 || made.starts.front().jobs.size() != 1 ||
            made.starts.front().probe)
          return false;
        JobId& job = made.starts.front().jobs.front();
        const auto found = watcher.jobs.find(job);
        if (found == watcher.jobs.end() || found->second.spec.deadline_seconds < 1e9) return false;
        const PoolJob& spec = found->second.spec;
        for (const auto& [id, other] : watcher.jobs) {
          if (id > job && other.spec.tenant == spec.tenant && other.spec.kind == spec.kind &&
              other.spec.need == spec.need && other.spec.gang == 1 && spec.gang == 1 &&
              other.spec.priority == spec.priority && other.spec.cost == spec.cost &&
              other.phase == PoolWatcher::Phase::waits && other.spec.deadline_seconds > 1e9 &&
              other.spec.not_before_seconds <= 0.0 && other.spec.after.empty() &&
              found->second.spec.not_before_seconds <= 0.0 && other.most > 1 && other.key > found->second.key) {
            job = id;
            return true;
          }
        }
        return false;
      },
      {"not in the order of keys"});
}

TEST(PoolProperties, NoticeAJobThatStartsBeforeItsTime) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher& watcher, PoolDecisions& made) {
        if (!made.ends.empty() || made.starts.size() != 1 || made.starts.front().jobs.size() != 1) return false;
        JobId& job = made.starts.front().jobs.front();
        if (!watcher.jobs.contains(job)) return false;
        const PoolJob& spec = watcher.jobs.at(job).spec;
        for (const auto& [id, other] : watcher.jobs) {
          const bool blocked =
              std::ranges::any_of(other.spec.after, [&](JobId one) { return watcher.jobs.contains(one); });
          if (!blocked || other.spec.kind != spec.kind || other.spec.gang != spec.gang) continue;
          job = id;
          return true;
        }
        return pool.waiting() < 0;
      },
      {"a job started before its time or its dependencies"});
}

TEST(PoolProperties, NoticeAGangThatIsNotWhole) {
  expect_noticed(
      [](const PoolState&, const PoolWatcher&, PoolDecisions& made) {
        for (PoolStart& start : made.starts) {
          if (start.devices.size() < 2) continue;
          start.devices.pop_back();
          return true;
        }
        return false;
      },
      {"a gang of another size"});
}

TEST(PoolProperties, NoticeADeviceThatDoesNotHaveWhatAJobNeeds) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher& watcher, PoolDecisions& made) {
        for (PoolStart& start : made.starts) {
          if (start.devices.size() > 1 || !watcher.jobs.contains(start.jobs.front())) continue;
          if (watcher.jobs.at(start.jobs.front()).spec.need != 1) continue;  // the label "special"
          for (std::size_t d = 0; d < pool.device_count(); ++d) {
            if (!pool.device(d).labels.empty() || !pool.active(d) || !pool.idle(d)) continue;
            start.devices.front() = d;
            return true;
          }
        }
        return false;
      },
      {"a device that the job does not accept"});
}

TEST(PoolProperties, NoticeATenantBeyondItsQuota) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher& watcher, PoolDecisions& made) {
        const std::vector<PoolTenantUse> use = pool.tenants();
        for (const PoolDecline& decline : made.declines) {
          if (decline.reason != PoolReason::quota || !made.starts.empty() || !made.ends.empty()) continue;
          for (const auto& [id, job] : watcher.jobs) {
            const PoolJob& spec = job.spec;
            if (job.phase != PoolWatcher::Phase::waits || spec.kind != decline.kind || spec.need != 0 ||
                spec.gang != 1 || !spec.after.empty() || spec.not_before_seconds > 0.0 || job.most < 2 ||
                use[spec.tenant].devices < use[spec.tenant].tenant.devices)
              continue;
            made.starts.push_back({.run = RunId{~std::uint64_t{0}},
                                   .devices = {decline.device},
                                   .jobs = {id},
                                   .kind = spec.kind,
                                   .cost = spec.cost});
            return true;
          }
        }
        return false;
      },
      {"a tenant uses more than its quota"});
}

TEST(PoolProperties, NoticeABatchWhosePaddingIsNotCounted) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher& watcher, PoolDecisions& made) {
        for (PoolStart& start : made.starts) {
          double sum = 0.0;
          for (const JobId id : start.jobs) {
            if (!watcher.jobs.contains(id)) return false;
            sum += watcher.jobs.at(id).spec.cost;
          }
          if (!pool.kind(start.kind).padded || sum == start.cost) continue;
          start.cost = sum;
          return true;
        }
        return false;
      },
      {"not the cost of its jobs with their padding"});
}

TEST(PoolProperties, NoticeADeviceThatIsIdleWhileWorkWaits) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher&, PoolDecisions& made) {
        const Placement placement = pool.options().placement;
        if (placement != Placement::automatic && placement != Placement::any) return false;
        if (made.declines.empty()) return false;
        made.declines.clear();
        return true;
      },
      {"an idle device left a job waiting without a reason that holds"});
}

TEST(PoolProperties, NoticeMoreBytesThanThereAre) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher&, PoolDecisions& made) {
        if (made.starts.size() != 1 || made.starts.front().evict.empty()) return false;
        const std::size_t device = made.starts.front().devices.front();
        if (pool.device(device).shares_memory_of) return false;
        double bytes = pool.used_bytes(device) + pool.options().memory_margin_bytes;
        for (const PoolEviction& one : made.starts.front().evict) {
          for (std::size_t k = 0; k < pool.kind_count(); ++k)
            bytes += pool.kind(k).model == one.model ? pool.kind(k).resident_bytes : 0.0;
        }
        if (bytes <= pool.device(device).memory_bytes) return false;
        made.starts.front().evict.clear();
        return true;
      },
      {"more bytes than the memory has"});
}

TEST(PoolProperties, NoticeARetiredDeviceThatStartsSomething) {
  expect_noticed(
      [](const PoolState& pool, const PoolWatcher&, PoolDecisions& made) {
        for (PoolStart& start : made.starts) {
          for (std::size_t d = 0; d < pool.device_count(); ++d) {
            if (pool.active(d)) continue;
            start.devices.front() = d;
            return true;
          }
        }
        return false;
      },
      {"a retired device started something"});
}

}  // namespace
}  // namespace paceline::plan::testing

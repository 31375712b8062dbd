// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "pool_watcher.hpp"

namespace paceline::plan::testing {
namespace {

// Changes decisions on their way to the watcher, once. Returns whether it did.
using Fault = std::function<bool(const PoolState&, const PoolWatcher&, PoolDecisions&)>;

class Script {
 public:
  Script(std::uint64_t seed, Fault fault) : draws_(seed), fault_(std::move(fault)), pool_(options()) {
    const std::size_t devices = draws_.count(1, 4);
    for (std::size_t d = 0; d < devices; ++d) {
      PoolDevice device{.name = "d" + std::to_string(d), .device_class = draws_.chance(0.5) ? "a" : "b"};
      if (draws_.chance(0.5)) device.labels.push_back("special");
      if (draws_.chance(0.5)) device.memory_bytes = static_cast<double>(draws_.integer(4, 12));
      if (d > 0 && draws_.chance(0.2)) device.shares_memory_of = draws_.count(0, d - 1);
      (void)pool_.add_device(0.0, device);
    }
    needs_ = {{}, {.labels = {"special"}}, {.accepts = [](const PoolDevice& one) { return one.device_class == "a"; }}};
    (void)pool_.add_need(needs_[1]);
    (void)pool_.add_need(needs_[2]);
    for (tenants_ = draws_.chance(0.5) ? 1 : draws_.count(2, 4); pool_.tenants().size() < tenants_;) {
      PoolTenant tenant{.name = "t", .weight = draws_.real(0.5, 3.0)};
      if (draws_.chance(0.5)) tenant.devices = draws_.integer(1, 2);
      if (draws_.chance(0.3)) tenant.memory_bytes = static_cast<double>(draws_.integer(1, 8));
      (void)pool_.add_tenant(tenant);
    }
    for (std::size_t k = draws_.count(1, 3); k > 0; --k) {
      PoolKind kind{.name = "k" + std::to_string(k), .idempotent = draws_.chance(0.5)};
      if (draws_.chance(0.5)) kind.sizes = {1, 2, 4, 8};
      if (draws_.chance(0.2)) kind.max_delay_seconds = 0.5;
      kind.padded = draws_.chance(0.3);
      if (draws_.chance(0.5)) kind.peak_bytes_per_item = 0.5 * static_cast<double>(draws_.integer(0, 2));
      if (draws_.chance(0.5)) {
        kind.model = kind.name;
        kind.resident_bytes = static_cast<double>(draws_.integer(1, 5));
        kind.reload_seconds = draws_.real(0.0, 1.0);
      }
      kinds_ = pool_.add_kind(kind) + 1;
      if (!draws_.chance(0.7)) continue;  // the others are unknown
      for (std::size_t d = 0; d < devices; ++d) (void)pool_.measure(0.0, d, kinds_ - 1, model(), 3);
    }
  }

  // The problem that the watcher saw, or "".
  std::string run(int events) {
    PoolWatcher watcher(pool_, needs_);
    watcher_ = &watcher;
    for (int i = 0; i < events && watcher.problem.empty(); ++i) event();
    for (std::size_t d = 0; d < pool_.device_count(); ++d) {
      watcher.lost.erase(d);
      if (!pool_.active(d)) tell(pool_.restore(now_, d));
    }
    for (int i = 0; !watcher.jobs.empty() && watcher.problem.empty(); ++i) {
      if (i > 100000) return "the script does not come to an end";
      if (!watcher.runs.empty()) {
        finish(RunResult::completed);
      } else if (wake_ < std::numeric_limits<double>::infinity()) {
        now_ = std::max(now_, wake_);
        tell(pool_.tick(now_));
      } else {
        std::string text = "jobs wait for ever:";
        for (const auto& [id, job] : watcher.jobs)
          text += " kind " + std::to_string(job.spec.kind) + " need " + std::to_string(job.spec.need) + " gang " +
                  std::to_string(job.spec.gang) + " priority " + std::to_string(static_cast<int>(job.spec.priority));
        for (const PoolDecline& one : pool_.tick(now_).declines) text += "; " + pool_.describe(one);
        return text;
      }
    }
    return watcher.problem;
  }
  [[nodiscard]] bool planted() const { return planted_; }

 private:
  CostModel model() {
    return CostModel::affine(0.125 * static_cast<double>(draws_.integer(0, 4)),
                             0.125 * static_cast<double>(draws_.integer(1, 16)));
  }
  PoolOptions options() {
    PoolOptions made;
    constexpr Placement all[] = {
        Placement::automatic,   Placement::automatic, Placement::automatic,         Placement::any,
        Placement::round_robin, Placement::weighted,  Placement::least_outstanding, Placement::earliest_finish};
    made.placement = all[draws_.count(0, 7)];
    made.memory_margin_bytes = draws_.chance(0.5) ? 1.0 : 0.0;
    return made;
  }

  void tell(PoolDecisions decisions) {
    wake_ = decisions.wake_seconds;
    if (fault_ && !planted_) planted_ = fault_(pool_, *watcher_, decisions);
    watcher_->decided(now_, decisions);
  }
  void finish(RunResult result) {
    auto run = watcher_->runs.begin();
    std::advance(run, draws_.integer(0, std::ssize(watcher_->runs) - 1));
    const RunId id = run->first;
    watcher_->finished(id, result);
    tell(pool_.finish(now_, id, result, draws_.real(0.0, 3.0)));
  }
  void withdraw() {
    auto run = watcher_->runs.begin();
    std::advance(run, draws_.integer(0, std::ssize(watcher_->runs) - 1));
    const RunId id = run->first;
    std::optional<JobId> cancelled;
    if (draws_.chance(0.5)) cancelled = run->second.jobs[draws_.count(0, run->second.jobs.size() - 1)];
    watcher_->withdrawn(id);
    const PoolDecisions decisions = pool_.withdraw(now_, id, cancelled);
    if (cancelled) {
      EXPECT_EQ(std::ranges::count(decisions.ends, *cancelled, &PoolEnd::job), 1);
    }
    tell(decisions);
  }
  void event() {
    now_ += draws_.chance(0.3) ? draws_.real(0.0, 1.0) : draws_.real(0.0, 0.05);
    const double what = draws_.real(0.0, 1.0);
    const std::size_t device = draws_.count(0, pool_.device_count() - 1);
    if (what < 0.5) {
      submit();
    } else if (what < 0.75) {
      if (watcher_->runs.empty()) return;
      const double how = draws_.real(0.0, 1.0);
      finish(how < 0.8    ? RunResult::completed
             : how < 0.9  ? RunResult::failed
             : how < 0.97 ? RunResult::out_of_memory
                          : RunResult::device_lost);
    } else if (what < 0.85) {
      if (wake_ < std::numeric_limits<double>::infinity()) now_ = std::max(now_, wake_);
      tell(pool_.tick(now_));
    } else if (what < 0.9) {
      if (watcher_->jobs.empty()) return;
      auto job = watcher_->jobs.begin();
      std::advance(job, draws_.integer(0, std::ssize(watcher_->jobs) - 1));
      bool cancelled = false;
      const bool waits = job->second.phase == PoolWatcher::Phase::waits;
      const PoolDecisions decisions = pool_.cancel(now_, job->first, cancelled);
      EXPECT_EQ(cancelled, waits);
      tell(decisions);
    } else if (what < 0.92) {
      if (!watcher_->runs.empty()) withdraw();
    } else if (what < 0.94) {
      tell(pool_.retire(now_, device));
    } else if (what < 0.945) {
      watcher_->lost.insert(device);
      tell(pool_.lose(now_, device));
    } else if (what < 0.97) {
      watcher_->lost.erase(device);
      tell(pool_.restore(now_, device));
    } else {
      tell(pool_.measure(now_, device, draws_.count(0, kinds_ - 1), model(), draws_.integer(1, 4)));
    }
  }
  void submit() {
    PoolJob job{.kind = draws_.count(0, kinds_ - 1)};
    if (draws_.chance(0.3)) job.need = draws_.count(0, 2);
    job.priority = static_cast<Priority>(draws_.integer(0, 3));
    if (draws_.chance(0.3)) job.deadline_seconds = draws_.real(0.1, 10.0);
    if (draws_.chance(0.1)) job.not_before_seconds = draws_.real(0.0, 3.0);
    if (draws_.chance(0.1)) job.gang = draws_.integer(2, 3);
    if (pool_.kind(job.kind).padded) job.cost = 0.25 * static_cast<double>(draws_.integer(1, 16));
    job.tenant = draws_.count(0, tenants_ - 1);
    for (const auto& [id, other] : watcher_->jobs) {
      if (job.after.size() < 2 && draws_.chance(0.05)) job.after.push_back(id);
    }
    JobId id{};
    // The books need the job before the decisions, and its number is known only after them.
    const PoolDecisions decisions = pool_.submit(now_, job, id);
    watcher_->submitted(now_, id, job);
    tell(decisions);
  }

  Draws draws_;
  Fault fault_;
  PoolState pool_;
  PoolWatcher* watcher_ = nullptr;
  std::vector<PoolNeed> needs_;
  std::size_t kinds_ = 0;
  std::size_t tenants_ = 1;  // with the one without a name
  double now_ = 0.0;
  double wake_ = std::numeric_limits<double>::infinity();
  bool planted_ = false;
};

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

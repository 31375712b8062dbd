// SPDX-License-Identifier: Apache-2.0
//
// The turns of tenants, against a slow oracle and by random events.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <ranges>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>
#include <paceline/plan/pool_ledger.hpp>

#include "draws.hpp"

namespace paceline::plan::testing {
namespace {

constexpr double kForEver = std::numeric_limits<double>::infinity();

/// The rule of pool.hpp, written as it reads, for jobs that any device may run, one at a time.
class SlowFairQueue {
 public:
  explicit SlowFairQueue(std::vector<double> weights) : weights_(std::move(weights)) {}

  struct Job {
    std::size_t tenant = 0;
    std::size_t priority = 0;
    double key = 0.0;
    double charge = 0.0;
    bool timed = false;
  };

  void add(JobId id, const Job& job) {
    waiting[id] = job;
    if (!job.timed) places_[job.priority].insert(job.key);
  }
  // The job that is next. It is charged, and leaves.
  JobId take() {
    double first = kForEver;
    std::size_t priority = places_.size();  // none
    JobId next{};
    for (std::size_t p = 0; p < places_.size(); ++p) {
      if (!places_[p].empty() && *places_[p].begin() < first) {
        first = *places_[p].begin();
        priority = p;
      }
    }
    for (const auto& [id, job] : waiting) {
      if (!job.timed || job.key > first) continue;
      first = job.key;
      priority = places_.size();
      next = id;
    }
    if (priority < places_.size()) {
      std::map<std::size_t, JobId> heads;  // of tenants
      for (const auto& [id, job] : waiting) {
        if (job.timed || job.priority != priority) continue;
        const auto [head, fresh] = heads.try_emplace(job.tenant, id);
        if (!fresh && job.key < waiting.at(head->second).key) head->second = id;
      }
      double least = kForEver;
      for (const auto& [tenant, id] : heads) {
        const double tag = tag_of(tenant, priority);
        if (tag > least || (tag == least && id > next)) continue;
        least = tag;
        next = id;
      }
      virtual_time_[priority] = least;
      places_[priority].erase(places_[priority].begin());
    }
    const Job job = waiting.at(next);
    waiting.erase(next);
    const std::pair of(job.tenant, job.priority);
    const double added = job.charge / weights_[job.tenant];
    const bool others = std::ranges::any_of(waiting, [&](const auto& one) {
      return !one.second.timed && one.second.tenant == job.tenant && one.second.priority == job.priority;
    });
    if (job.timed && others) {
      debts_[of] += added;
    } else {
      tags_[of] = tag_of(job.tenant, job.priority) + added + (job.timed ? 0.0 : std::exchange(debts_[of], 0.0));
    }
    return next;
  }

  std::map<JobId, Job> waiting;

 private:
  double tag_of(std::size_t tenant, std::size_t priority) {
    return std::max(tags_[{tenant, priority}], virtual_time_[priority]);
  }
  std::vector<double> weights_;
  std::array<double, 3> virtual_time_ = {};
  std::array<std::multiset<double>, 3> places_;
  std::map<std::pair<std::size_t, std::size_t>, double> tags_;
  std::map<std::pair<std::size_t, std::size_t>, double> debts_;
};

TEST(PoolTenants, TakeTurnsExactlyByTheRule) {
  int overtook = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    Draws draws(seed);
    PoolState pool({.placement = Placement::any});
    const std::size_t kinds = draws.count(1, 3);
    for (std::size_t k = 0; k < kinds; ++k) (void)pool.add_kind({.name = std::to_string(k), .queue_limit = 1000});
    std::vector<double> weights{1.0};
    for (std::size_t t = draws.count(1, 4); t > 0; --t) {
      weights.push_back(0.5 * static_cast<double>(draws.integer(1, 6)));
      (void)pool.add_tenant({.name = std::to_string(t), .weight = weights.back()});
    }
    for (std::size_t d = draws.count(1, 3); d > 0; --d) (void)pool.add_device(0.0, {.name = "d"});
    SlowFairQueue slow(weights);
    std::vector<RunId> runs;
    double now = 0.0;
    const auto follow = [&](const PoolDecisions& decided) {
      for (const PoolStart& start : decided.starts) {
        runs.push_back(start.run);
        const double key = slow.waiting.at(start.jobs.front()).key;
        const auto before = [&](const auto& one) { return one.second.key < key; };
        overtook += std::ranges::any_of(slow.waiting, before) ? 1 : 0;
        if (slow.take() != start.jobs.front()) return false;
      }
      return true;
    };
    for (int event = 0; event < 150; ++event) {
      now += draws.real(0.0, 0.5);
      const double what = draws.real(0.0, 1.0);
      if (what < 0.6) {
        PoolJob job{.kind = draws.count(0, kinds - 1), .priority = static_cast<Priority>(draws.count(0, 2))};
        if (draws.chance(0.2)) job.deadline_seconds = draws.real(1000.0, 1100.0);
        job.tenant = draws.count(0, weights.size() - 1);
        job.charge = 0.25 * static_cast<double>(draws.integer(1, 20));
        const bool timed = job.deadline_seconds < kForEver;
        const auto priority = static_cast<std::size_t>(job.priority);
        JobId id{};
        const PoolDecisions decided = pool.submit(now, job, id);
        const double key = now + (timed ? job.deadline_seconds : pool.options().patience[priority]);
        slow.add(id, {job.tenant, priority, key, job.charge, timed});
        ASSERT_TRUE(follow(decided)) << "seed " << seed;
      } else if (what < 0.95 && !runs.empty()) {
        const auto run = runs.begin() + draws.integer(0, std::ssize(runs) - 1);
        const RunId id = *run;
        runs.erase(run);
        ASSERT_TRUE(follow(pool.finish(now, id, RunResult::completed, draws.real(0.0, 9.0)))) << "seed " << seed;
      }
    }
  }
  EXPECT_GT(overtook, 5000);
}

// What each of two tenants was served since both began to wait for the same devices may differ by at most what one
// start of each charges, whatever runs again, and whatever others wait for: a job, or a batch where jobs wait that it
// cannot hold. Some have few jobs for long, which others fill up to batches.
TEST(PoolTenants, WhoWaitAllTheTimeAreServedInTheRatioOfTheirWeights) {
  int checked = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Draws draws(seed);
    PoolKind kind{.name = "work", .idempotent = draws.chance(0.5), .queue_limit = 10000};
    if (draws.chance(0.5)) kind.sizes = {1, 2, 4, 8};
    PoolState pool({.placement = draws.chance(0.5) ? Placement::any : Placement::automatic});
    (void)pool.add_kind(kind);
    const std::size_t devices = draws.count(1, 4);
    for (std::size_t d = 0; d < devices; ++d) {
      (void)pool.add_device(0.0, {.name = "d", .device_class = std::to_string(d)});
      (void)pool.measure(0.0, d, 0, CostModel::affine(draws.real(0.0, 1.0), draws.real(0.1, 2.0)), 3);
    }
    const std::size_t tenants = draws.count(2, 4);
    for (std::size_t t = 0; t < tenants; ++t) (void)pool.add_tenant({.name = "t", .weight = draws.real(0.5, 4.0)});
    std::vector<std::size_t> needs(tenants + 1, 0);  // of tenants
    if (draws.chance(0.5)) {
      std::set<std::string> some;
      for (std::size_t d = 0; d < devices; ++d) {
        if (draws.chance(0.5)) some.insert(std::to_string(d));
      }
      if (some.empty()) some.insert("0");
      const std::size_t need =
          pool.add_need({.accepts = [some](const PoolDevice& one) { return some.contains(one.device_class); }});
      for (std::size_t& one : needs) one = draws.chance(0.5) ? need : 0;
    }
    const bool alike = std::ranges::all_of(needs | std::views::drop(1), [&](auto one) { return one == needs[1]; });
    std::map<JobId, std::pair<std::size_t, double>> charges;  // by job: tenant, charge
    std::vector<std::int64_t> waiting(tenants + 1, 0);
    std::vector<double> served(tenants + 1, 0.0);
    std::vector<double> largest(tenants + 1, 0.0);                                   // what one start charged
    std::vector<std::int64_t> most(tenants + 1, 30);                                 // that wait at once
    std::map<std::pair<std::size_t, std::size_t>, std::pair<double, double>> pairs;  // served when both began to wait
    std::vector<RunId> runs;
    std::map<RunId, std::vector<JobId>> jobs_of;
    double now = 0.0;
    const auto follow = [&](const PoolDecisions& decided) {
      for (const PoolStart& start : decided.starts) {
        runs.push_back(start.run);
        jobs_of[start.run] = start.jobs;
        std::map<std::size_t, double> sums;
        for (const JobId id : start.jobs) {
          auto& [tenant, unpaid] = charges.at(id);
          const double charge = std::exchange(unpaid, 0.0);
          sums[tenant] = alike ? std::max(sums[tenant], charge) : sums[tenant] + charge;
          served[tenant] += charge;
          --waiting[tenant];
        }
        for (const auto& [tenant, sum] : sums) largest[tenant] = std::max(largest[tenant], sum);
      }
      const std::vector<PoolTenantUse> use = pool.tenants();
      for (std::size_t a = 1; a <= tenants; ++a) {
        for (std::size_t b = a + 1; b <= tenants; ++b) {
          if (waiting[a] == 0 || waiting[b] == 0 || needs[a] != needs[b]) {
            pairs.erase({a, b});
            continue;
          }
          const auto [before_a, before_b] = pairs.try_emplace({a, b}, served[a], served[b]).first->second;
          const double wa = use[a].tenant.weight;
          const double wb = use[b].tenant.weight;
          const double apart = (served[a] - before_a) / wa - (served[b] - before_b) / wb;
          if (std::abs(apart) > largest[a] / wa + largest[b] / wb + 1e-9) return false;
          checked += served[a] > before_a && served[b] > before_b ? 1 : 0;
        }
      }
      return true;
    };
    for (int event = 0; event < 400; ++event) {
      now += 0.001;
      const std::size_t tenant = draws.count(1, tenants);
      if (event % 50 == 0) {
        for (std::int64_t& one : most) one = draws.chance(0.5) ? 30 : 1;
      }
      if (draws.chance(0.6) && waiting[tenant] < most[tenant]) {
        const std::int64_t more = std::min(most[tenant] - waiting[tenant], draws.integer(1, kind.sizes.back()));
        for (std::int64_t n = 0; n < more; ++n) {
          const double charge = draws.real(0.1, 5.0);
          JobId id{};
          ++waiting[tenant];
          const PoolJob job{.need = needs[tenant], .tenant = tenant, .charge = charge};
          const PoolDecisions decided = pool.submit(now, job, id);
          charges[id] = {tenant, charge};
          ASSERT_TRUE(follow(decided)) << "seed " << seed;
        }
      } else if (!runs.empty()) {
        const auto run = runs.begin() + draws.integer(0, std::ssize(runs) - 1);
        const RunId id = *run;
        runs.erase(run);
        const RunResult result = kind.idempotent && draws.chance(0.2) ? RunResult::device_lost : RunResult::completed;
        if (result == RunResult::device_lost) {
          for (const JobId again : jobs_of.at(id)) ++waiting[charges.at(again).first];
        }
        ASSERT_TRUE(follow(pool.finish(now, id, result, draws.real(0.0, 5.0)))) << "seed " << seed;
      }
    }
  }
  EXPECT_GT(checked, 10000);
}

// Whatever is submitted, with tenants of whom only one has jobs everything is decided as without tenants.
TEST(PoolTenants, ChangeNothingForOneAlone) {
  constexpr std::array placements{Placement::automatic, Placement::any, Placement::earliest_finish,
                                  Placement::round_robin};
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Draws draws(seed);
    PoolOptions options{.placement = placements[draws.count(0, 3)]};
    std::array pools{PoolState(options), PoolState(options)};
    const auto both = [&](const auto& call) {
      const PoolDecisions one = call(pools[0]);
      EXPECT_EQ(ledger_json(one), ledger_json(call(pools[1]))) << "seed " << seed;
      return one;
    };
    const std::size_t devices = draws.count(1, 4);
    for (std::size_t d = 0; d < devices; ++d) {
      const PoolDevice device{.name = "d", .device_class = std::to_string(d), .memory_bytes = draws.real(5.0, 20.0)};
      (void)both([&](PoolState& pool) { return pool.add_device(0.0, device); });
    }
    std::vector<PoolKind> kinds(draws.count(1, 3));
    for (PoolKind& kind : kinds) {
      if (draws.chance(0.6)) kind.sizes = {1, 2, 4, 8};
      kind.padded = draws.chance(0.4);
      kind.idempotent = draws.chance(0.5);
      kind.max_delay_seconds = draws.chance(0.2) ? 0.5 : 0.0;
      kind.peak_bytes_per_item = draws.real(0.0, 2.0);
      const std::size_t number = pools[0].add_kind(kind);
      (void)pools[1].add_kind(kind);
      for (std::size_t d = 0; d < devices && draws.chance(0.9); ++d) {
        const auto model = CostModel::affine(draws.real(0.0, 1.0), draws.real(0.1, 2.0));
        (void)both([&](PoolState& pool) { return pool.measure(0.0, d, number, model, 3); });
      }
    }
    // The other one learns of tenants before, or while jobs wait. One has quotas that nothing exceeds.
    const int from = draws.chance(0.5) ? 0 : 60;
    std::vector<RunId> runs;
    std::vector<JobId> jobs;
    double now = 0.0;
    for (int event = 0; event < 200; ++event) {
      if (event == from) {
        (void)pools[1].add_tenant({.name = "other"});
        (void)pools[1].add_tenant({.name = "third", .weight = 3.0, .devices = 1, .memory_bytes = 1.0});
      }
      now += draws.real(0.0, 0.3);
      const double what = draws.real(0.0, 1.0);
      PoolDecisions decided;
      if (what < 0.55) {
        PoolJob job{.kind = draws.count(0, kinds.size() - 1), .priority = static_cast<Priority>(draws.count(0, 3))};
        if (draws.chance(0.3)) job.deadline_seconds = draws.real(0.5, 20.0);
        if (draws.chance(0.2)) job.not_before_seconds = draws.real(0.0, 2.0);
        if (draws.chance(0.1)) job.gang = draws.integer(2, 3);
        if (draws.chance(0.1) && !jobs.empty()) job.after = {jobs.back()};
        if (kinds[job.kind].padded) job.cost = draws.real(0.5, 4.0);
        JobId id{};
        decided = both([&](PoolState& pool) { return pool.submit(now, job, id); });
        jobs.push_back(id);
      } else if (what < 0.85 && !runs.empty()) {
        const auto run = runs.begin() + draws.integer(0, std::ssize(runs) - 1);
        const RunId id = *run;
        runs.erase(run);
        const double how = draws.real(0.0, 1.0);
        const double took = draws.real(0.0, 3.0);
        if (how < 0.2) {
          decided = both([&](PoolState& pool) { return pool.withdraw(now, id); });
        } else {
          const RunResult result = how < 0.8   ? RunResult::completed
                                   : how < 0.9 ? RunResult::failed
                                               : RunResult::out_of_memory;
          decided = both([&](PoolState& pool) { return pool.finish(now, id, result, took); });
        }
      } else if (what < 0.9 && !jobs.empty()) {
        const JobId id = jobs[draws.count(0, jobs.size() - 1)];
        decided = both([&](PoolState& pool) {
          bool cancelled = false;
          return pool.cancel(now, id, cancelled);
        });
      } else if (what < 0.95) {
        const std::size_t d = draws.count(0, devices - 1);
        const bool active = pools[0].active(d);
        decided = both([&](PoolState& pool) { return active ? pool.retire(now, d) : pool.restore(now, d); });
      } else {
        decided = both([&](PoolState& pool) { return pool.tick(now); });
      }
      for (const PoolStart& start : decided.starts) runs.push_back(start.run);
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_EQ(pools[1].tenants().front().waiting, pools[1].waiting()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace paceline::plan::testing

// SPDX-License-Identifier: Apache-2.0
//
// Tenants with jobs of several kinds and needs, by random events.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

/// A pool, and books of what each tenant was served in each priority. `alike`: all jobs cost the same, have the same
/// priority, and start on any device that is free.
class Lines {
 public:
  Lines(std::uint64_t seed, bool alike)
      : alike_(alike),
        draws_(seed),
        pool_({.placement = alike || draws_.chance(0.5) ? Placement::any : Placement::automatic}) {
    devices_ = draws_.count(1, 4);
    for (std::size_t d = 0; d < devices_; ++d) {
      const double bytes = some(0.3) ? draws_.real(2.0, 8.0) : 1e9;
      (void)pool_.add_device(0.0, {.name = "d", .device_class = std::to_string(d), .memory_bytes = bytes});
    }
    for (std::size_t k = draws_.count(1, 3); k > 0; --k) {
      PoolKind kind{.name = std::to_string(k), .idempotent = draws_.chance(0.5), .queue_limit = 10000};
      if (draws_.chance(0.6)) kind.sizes = {1, 2, 4, 8};
      kind.max_delay_seconds = some(0.2) ? 0.005 : 0.0;
      kind.padded = some(0.15);
      kind.peak_bytes_per_item = some(0.3) ? draws_.real(0.5, 2.0) : 0.0;
      const std::size_t number = pool_.add_kind(kind);
      kinds_.push_back(kind);
      for (std::size_t d = 0; d < devices_ && draws_.chance(0.9); ++d) {
        const auto model = CostModel::affine(draws_.real(0.0, 1.0), draws_.real(0.1, 2.0));
        (void)pool_.measure(0.0, d, number, model, 3);
      }
    }
    const std::set<std::string> those{std::to_string(draws_.count(0, devices_ - 1)),
                                      std::to_string(draws_.count(0, devices_ - 1))};
    (void)pool_.add_need({.accepts = [those](const PoolDevice& one) { return those.contains(one.device_class); }});
    // Tenants of a party have jobs of the same kinds and needs.
    std::vector<std::vector<Line>> parties(draws_.count(1, 2));
    for (std::vector<Line>& party : parties) {
      for (std::size_t n = draws_.count(1, 3); n > 0; --n)
        party.emplace_back(draws_.count(0, kinds_.size() - 1), some(0.3) ? 1 : 0);
    }
    const std::size_t priorities = some(0.5) ? 2 : 1;
    const std::size_t tenants = draws_.count(3, 5);
    for (std::size_t t = 0; t <= tenants; ++t) {
      Tenant& made = tenants_.emplace_back();
      made.lines = parties[draws_.count(0, parties.size() - 1)];
      made.priorities = priorities;
      if (t == 0) continue;
      PoolTenant spec{.name = "t", .weight = made.weight = std::exp(draws_.real(-2.0, 2.0))};
      made.odd = t == tenants && !alike;
      if (made.odd && draws_.chance(0.5)) spec.devices = draws_.integer(1, 2);
      if (made.odd && draws_.chance(0.3)) spec.memory_bytes = draws_.real(1.0, 8.0);
      (void)pool_.add_tenant(spec);
    }
  }

  /// What is wrong, or "".
  std::string run(int events) {
    for (int event = 0; event < events && problem_.empty(); ++event) {
      now_ += draws_.chance(0.1) ? draws_.real(0.0, 0.3) : 0.001;
      for (std::size_t t = 0; t < tenants_.size(); ++t) {
        Tenant& one = tenants_[t];
        if (draws_.chance(0.005)) one.most = draws_.chance(0.5) ? 12 : draws_.integer(0, 1);
        if (one.most > 1 || draws_.chance(0.2)) fill_up(t);
      }
      const double what = draws_.real(0.0, 1.0);
      if (what < 0.9) {
        finish();
      } else if (what < 0.95) {
        const std::size_t d = draws_.count(0, devices_ - 1);
        follow(pool_.active(d) ? pool_.retire(now_, d, true) : pool_.restore(now_, d));
      } else {
        follow(pool_.tick(now_));
      }
    }
    return problem_;
  }
  int checked = 0;

 private:
  using Line = std::pair<std::size_t, std::size_t>;  // kind, need
  using Queue = std::pair<std::size_t, Priority>;    // of a tenant
  struct Tenant {
    double weight = 1.0;
    bool odd = false;  // quotas, deadlines and gangs, which others only have beside them
    std::vector<Line> lines = {};
    std::size_t priorities = 1;
    std::int64_t most = 12;   // of each line and priority, that wait
    std::int64_t passed = 0;  // starts without it, while it has waited
  };
  struct Job {
    Queue queue = {};
    Line line = {};
    double unpaid = 0.0;
  };
  struct Book {
    double served = 0.0;
    double start = 0.0;  // the most that one start has charged, and one job
    double job = 0.0;
    std::map<Line, std::int64_t> waiting = {};
    [[nodiscard]] std::set<Line> lines() const {
      std::set<Line> found;
      for (const auto& [line, count] : waiting) {
        if (count > 0) found.insert(line);
      }
      return found;
    }
  };
  struct Pair {
    std::set<Line> lines = {};
    double a = 0.0;  // what they were served when both began to wait there
    double b = 0.0;
  };

  bool some(double part) { return !alike_ && draws_.chance(part); }
  void fill_up(std::size_t t) {
    const Tenant& of = tenants_[t];
    for (const Line& line : of.lines) {
      for (std::size_t p = 0; p < of.priorities; ++p) {
        const Queue queue{t, p == 0 ? Priority::normal : Priority::interactive};
        const std::int64_t waiting = books_[queue].waiting[line];
        for (std::int64_t n = waiting; waiting <= of.most / 2 && n < of.most; ++n) submit(queue, line);
      }
    }
  }
  void submit(const Queue& queue, const Line& line) {
    PoolJob job{.kind = line.first, .need = line.second, .priority = queue.second, .tenant = queue.first};
    job.charge = alike_ ? 1.0 : draws_.real(0.1, 5.0);
    if (tenants_[queue.first].odd && draws_.chance(0.2)) job.deadline_seconds = draws_.real(0.1, 10.0);
    if (tenants_[queue.first].odd && draws_.chance(0.1)) job.gang = 2;
    if (kinds_[line.first].padded) job.cost = draws_.real(0.5, 4.0);
    JobId id{};
    const PoolDecisions decided = pool_.submit(now_ += 1e-5, job, id);
    ++books_[queue].waiting[line];
    jobs_[id] = {queue, line, job.charge};
    follow(decided);
  }
  void finish() {
    if (runs_.empty()) return;
    const auto run = std::next(runs_.begin(), draws_.integer(0, std::ssize(runs_) - 1));
    const PoolStart start = run->second;
    runs_.erase(run);
    const bool lost = kinds_[start.kind].idempotent && draws_.chance(0.2);
    for (const JobId id : start.jobs) ++books_[jobs_.at(id).queue].waiting[jobs_.at(id).line];  // until it ends
    follow(pool_.finish(now_, start.run, lost ? RunResult::device_lost : RunResult::completed, draws_.real(0.0, 2.0)));
  }
  void follow(const PoolDecisions& decided) {
    for (const PoolEnd& end : decided.ends) --books_[jobs_.at(end.job).queue].waiting[jobs_.at(end.job).line];
    compare();  // what has come may wait elsewhere
    for (const PoolStart& start : decided.starts) {
      runs_[start.run] = start;
      if (alike_) count(start);
      std::map<Queue, double> sums;
      for (const JobId id : start.jobs) {
        Job& job = jobs_.at(id);
        Book& book = books_[job.queue];
        const double charge = std::exchange(job.unpaid, 0.0);
        --book.waiting[job.line];
        book.served += charge;
        book.start = std::max(book.start, sums[job.queue] += charge);
        book.job = std::max(book.job, charge);
      }
    }
    compare();
  }
  // Before a start's jobs are in the books. What runs again takes a turn and pays for none.
  void count(const PoolStart& start) {
    const bool again = std::ranges::any_of(start.jobs, [&](JobId id) { return jobs_.at(id).unpaid == 0.0; });
    for (std::size_t t = 0; t < tenants_.size(); ++t) {
      Tenant& one = tenants_[t];
      const Book& book = books_[{t, Priority::normal}];
      const bool starts = std::ranges::any_of(start.jobs, [&](JobId id) { return jobs_.at(id).queue.first == t; });
      one.passed = starts || book.lines().empty() ? 0 : one.passed + (again ? 0 : 1);
      double most = 0.0;
      for (const Tenant& other : tenants_) {
        if (&other != &one) most += std::floor(other.weight * book.start / one.weight + 1.0 + 1e-9);
      }
      if (static_cast<double>(one.passed) > most) problem_ = "waits for " + std::to_string(one.passed) + " starts";
      checked += one.passed > 0 ? 1 : 0;
    }
  }
  void compare() {
    std::map<Queue, std::set<Line>> lines;
    for (const auto& [queue, book] : books_) {
      if (!tenants_[queue.first].odd) lines[queue] = book.lines();
    }
    for (auto a = lines.begin(); a != lines.end(); ++a) {
      for (auto b = std::next(a); b != lines.end(); ++b) {
        if (a->first.second == b->first.second) compare(*a, *b);
      }
    }
  }
  void compare(const std::pair<const Queue, std::set<Line>>& of_a, const std::pair<const Queue, std::set<Line>>& of_b) {
    const std::set<Line>& lines = of_a.second;
    const bool padded = std::ranges::any_of(lines, [&](const Line& one) { return kinds_[one.first].padded; });
    if (lines.empty() || padded || lines != of_b.second) {
      pairs_.erase({of_a.first, of_b.first});
      return;
    }
    const Book& a = books_.at(of_a.first);
    const Book& b = books_.at(of_b.first);
    const Pair now{lines, a.served, b.served};
    Pair& pair = pairs_.try_emplace({of_a.first, of_b.first}, now).first->second;
    if (pair.lines != lines) pair = now;
    const double needs = lines.begin()->second == lines.rbegin()->second ? 1.0 : 2.0;
    const auto most = [&](const Book& book) {
      return needs * book.start + static_cast<double>(lines.size()) * book.job;
    };
    const double weight_a = tenants_[of_a.first.first].weight;
    const double weight_b = tenants_[of_b.first.first].weight;
    const double bound = most(a) / weight_a + most(b) / weight_b;
    const double apart = (now.a - pair.a) / weight_a - (now.b - pair.b) / weight_b;
    if (std::abs(apart) > bound + 1e-9) problem_ = "apart by " + std::to_string(apart / bound) + " of the bound";
    if (!alike_) checked += now.a > pair.a && now.b > pair.b ? 1 : 0;
  }

  bool alike_;
  Draws draws_;
  PoolState pool_;
  std::size_t devices_ = 1;
  std::vector<PoolKind> kinds_;
  std::vector<Tenant> tenants_;
  std::map<Queue, Book> books_;
  std::map<JobId, Job> jobs_;
  std::map<RunId, PoolStart> runs_;
  std::map<std::pair<Queue, Queue>, Pair> pairs_;
  double now_ = 0.0;
  std::string problem_;
};

void expect_within_bounds(std::uint64_t seeds, bool alike) {
  std::int64_t checked = 0;
  int bad = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Lines lines(seed, alike);
    const std::string problem = lines.run(600);
    EXPECT_EQ(problem, "") << "seed " << seed;
    if ((bad += problem.empty() ? 0 : 1) > 10) return;
    checked += lines.checked;
  }
  EXPECT_GT(checked, 20 * static_cast<std::int64_t>(seeds));
}

// Two tenants that wait in the same lines all the time, whatever is lost, and whatever quotas, deadlines, gangs and
// padded batches others have.
TEST(PoolTenants, KeepTheirSharesInSeveralLines) { expect_within_bounds(1000, false); }

// Each other tenant starts once before one that comes anew, and as often as it could have while that one was served.
TEST(PoolTenants, WaitForFewStartsOfOthers) { expect_within_bounds(1000, true); }

/// Two devices, a kind 0 with batches of up to 8, a kind 1 without, and tenants who have enough of one kind.
struct Demand : Box {
  Demand() : Box({1.0, 1.0}, {.placement = Placement::any}, {.name = "batches", .sizes = {1, 2, 4, 8}}) {
    (void)pool.add_kind({.name = "single", .peak_bytes_per_item = 1.0});
  }
  std::size_t add(double weight, PoolJob job, int most) {
    job.tenant = pool.add_tenant({.name = "t", .weight = weight});
    all[job.tenant] = {job, most};
    return job.tenant;
  }
  void run(int finishes, const std::vector<std::size_t>& on) {
    for (int k = 0; k < finishes; ++k) {
      for (auto& [tenant, one] : all) {
        while (one.waiting < one.most) {
          const JobId id = submit(now, one.job);
          tenant_of[id] = tenant;
          ++one.waiting;
          follow();
        }
      }
      const auto run = runs.extract(on[static_cast<std::size_t>(k) % on.size()]);
      if (run.empty()) continue;  // the device has waited, or was a gang's
      (void)finish(now += 1.0, run.mapped());
      follow();
    }
  }
  void follow() {
    for (const PoolStart& start : last.starts) {
      runs[start.devices.front()] = start;
      for (const JobId id : start.jobs) {
        --all.at(tenant_of.at(id)).waiting;
        ++all.at(tenant_of.at(id)).served;
      }
    }
  }
  struct Tenant {
    PoolJob job = {};
    int most = 0;
    int waiting = 0;
    int served = 0;
  };
  std::map<std::size_t, Tenant> all;
  std::map<JobId, std::size_t> tenant_of;
  std::map<std::size_t, PoolStart> runs;
  double now = 0.0;
};

TEST(PoolTenants, DoNotWaitLaterForWhatTheyFilledUp) {
  Demand demand;
  (void)demand.add(1.0, {}, 1);  // one request at a time
  const std::size_t filler = demand.add(1.0, {}, 20);
  const std::size_t other = demand.add(1.0, {.kind = 1}, 20);
  demand.run(100, {0, 1});
  const int before = demand.all[filler].served;
  EXPECT_GT(before, 5 * demand.all[other].served) << "no place stays empty";
  const std::size_t fresh = demand.add(1.0, {}, 20);
  demand.run(100, {0, 1});
  EXPECT_NEAR(demand.all[fresh].served, demand.all[filler].served - before, 16);
}

TEST(PoolTenants, DoNotWaitLaterForWhatTheyFilledUpBesideOtherNeeds) {
  Demand demand;
  (void)demand.pool.retire(0.0, 1);
  const std::size_t thin = demand.add(1.0, {}, 1);
  const std::size_t filler = demand.add(1.0, {}, 20);
  const std::size_t need = demand.pool.add_need({.labels = {"d0"}});
  (void)demand.add(1.0, {.kind = 1, .need = need}, 20);
  demand.run(100, {0});
  demand.all[thin].most = 0;
  const int before = demand.all[filler].served;
  demand.run(30, {0});
  EXPECT_GT(demand.all[filler].served, before + 8);
}

// The quota of one of them lets jobs start only beside a request that it has held for long, which each batch has.
TEST(PoolTenants, ShareWhatTheyFillUpBesideWhatAQuotaHasHeld) {
  Demand demand;
  (void)demand.pool.retire(0.0, 1);
  const std::size_t held = demand.pool.add_tenant({.name = "t", .devices = 1});
  demand.all[held] = {{.priority = Priority::batch, .tenant = held}, 20};
  const std::size_t filler = demand.add(1.0, {.priority = Priority::batch}, 20);
  (void)demand.add(1.0, {.kind = 1, .priority = Priority::batch}, 20);
  for (int k = 0; k < 50; ++k) {
    demand.tenant_of[demand.submit(demand.now, {.priority = Priority::interactive, .tenant = held})] = held;
    ++demand.all[held].waiting;
    demand.follow();
    demand.run(1, {0});
  }
  EXPECT_GT(demand.all[filler].served, 100);
  EXPECT_NEAR(demand.all[held].served - 50, demand.all[filler].served, 16);
}

// They wait for one device, and another tenant runs jobs on one that has no memory for theirs.
TEST(PoolTenants, KeepTheirSharesOfADeviceWhileOthersRunElsewhere) {
  Demand demand;
  (void)demand.pool.lose(0.0, 1);
  (void)demand.pool.add_device(0.0, {.name = "d2", .memory_bytes = 0.5});
  (void)demand.add(1.0, {}, 20);
  const std::size_t a = demand.add(1.0, {.kind = 1}, 20);
  const std::size_t b = demand.add(0.1, {.kind = 1}, 20);
  demand.run(2200, {0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2});
  EXPECT_GT(demand.all[a].served, 50);
  EXPECT_NEAR(demand.all[a].served, 10 * demand.all[b].served, 22);
}

// One of them waits for devices that are retired, and has the least tag for ever.
TEST(PoolTenants, ServeGangsBesideOneThatCannotStart) {
  Demand demand;
  for (const std::size_t d : {2, 3}) {
    (void)demand.pool.add_device(0.0, {.name = "retired"});
    (void)demand.pool.retire(0.0, d);
  }
  (void)demand.add(1.0, {.kind = 1, .gang = 4}, 1);
  const std::size_t gangs = demand.add(1.0, {.kind = 1, .gang = 2}, 5);
  const std::size_t single = demand.add(1.0, {.kind = 1}, 20);
  demand.run(600, {0, 1});
  EXPECT_GT(demand.all[single].served, 100);
  EXPECT_NEAR(2 * demand.all[gangs].served, demand.all[single].served, 4);
}

}  // namespace
}  // namespace paceline::plan::testing

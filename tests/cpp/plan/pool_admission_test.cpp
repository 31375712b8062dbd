// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

constexpr double kNoEnd = std::numeric_limits<double>::infinity();

// When devices that work from these times on have done so much, by halving.
double done_at(const std::vector<double>& from, const std::vector<double>& rates, double jobs) {
  double low = 0.0;
  double high = 1e4;
  for (int k = 0; k < 100; ++k) {
    const double middle = (low + high) / 2.0;
    double done = 0.0;
    for (std::size_t d = 0; d < from.size(); ++d) done += rates[d] * std::max(middle - from[d], 0.0);
    (done < jobs ? low : high) = middle;
  }
  return high;
}

using Waiting = std::pair<double, double>;  // its key and its deadline

// How many jobs are late if each device, from when it is free, takes the first one that it ends in time.
std::size_t late_jobs(std::vector<double> free, const std::vector<double>& seconds, std::vector<Waiting> jobs) {
  std::ranges::sort(jobs);
  for (;;) {
    std::size_t next = 0;
    for (std::size_t d = 0; d < free.size(); ++d) {
      if (std::pair(free[d], seconds[d]) < std::pair(free[next], seconds[next])) next = d;
    }
    if (free[next] == kNoEnd) return jobs.size();
    const double end = free[next] + seconds[next];
    const auto job = std::ranges::find_if(jobs, [&](const Waiting& one) { return end <= one.second; });
    if (job == jobs.end()) {
      free[next] = kNoEnd;
    } else {
      free[next] = end;
      jobs.erase(job);
    }
  }
}

// What the header says of admission, at one time, with released devices or without.
void expect_the_rule(bool released, int jobs, double longest) {
  int refused = 0;
  int refused_for_others = 0;
  int taken = 0;
  int by_released = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Draws draws(seed);
    std::vector<double> seconds;
    std::vector<double> from;
    std::vector<double> rates;
    for (std::size_t d = 0, count = draws.count(released ? 2 : 1, 4); d < count; ++d) {
      seconds.push_back(0.125 * static_cast<double>(draws.integer(1, 32)));
      from.push_back(released && d > 0 && draws.chance(0.6) ? draws.real(0.5, 10.0) : 0.0);
      rates.push_back(1.0 / seconds.back());
    }
    std::vector<double> free = from;
    Box box(seconds, {.placement = Placement::any}, {.name = "work", .queue_limit = 1000});
    for (std::size_t d = 0; d < from.size(); ++d) {
      if (from[d] > 0.0) (void)box.pool.retire(0.0, d, true, from[d]);
    }
    std::map<JobId, Waiting> waiting;
    for (int job = 0; job < jobs; ++job) {
      const double deadline = released || draws.chance(0.7) ? draws.real(0.1, longest) : kNoEnd;
      const bool soon = draws.chance(0.3);
      const double key = deadline < kNoEnd ? deadline : soon ? 0.1 : 60.0;
      std::vector<Waiting> all;
      double ahead = 0.0;
      for (const auto& [id, other] : waiting) {
        all.push_back(other);
        ahead += other.first <= key ? 1.0 : 0.0;
      }
      const double served = done_at(from, rates, ahead);
      double end = kNoEnd;
      double end_by_active = kNoEnd;
      for (std::size_t d = 0; d < from.size(); ++d) {
        const double here = std::max(served, from[d]) + 1.3 * seconds[d];
        end = std::min(end, here);
        if (from[d] == 0.0) end_by_active = std::min(end_by_active, here);
      }
      const std::size_t late = late_jobs(free, seconds, all);
      all.emplace_back(key, deadline);
      const bool harms = deadline < kNoEnd && late_jobs(free, seconds, all) > late;
      const Priority priority = soon ? Priority::interactive : Priority::batch;
      const JobId id = box.submit(0.0, {.priority = priority, .deadline_seconds = deadline});
      const bool rejected = !box.last.ends.empty() && box.last.ends.front().outcome == JobOutcome::rejected;
      if (!(std::abs(end - deadline) <= 1e-9)) {
        ASSERT_EQ(rejected, end > deadline || harms) << "seed " << seed << " job " << job;
      }
      (rejected ? refused : taken) += 1;
      refused_for_others += rejected && end <= deadline ? 1 : 0;
      by_released += !rejected && end_by_active > deadline ? 1 : 0;
      if (!rejected) waiting[id] = {key, deadline};
      for (const PoolStart& start : box.last.starts) {
        waiting.erase(start.jobs.front());
        free[start.devices.front()] += seconds[start.devices.front()];
      }
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(refused_for_others, 1000);
  EXPECT_GT(taken, 1000);
  EXPECT_EQ(by_released > 200, released);
}

TEST(PoolAdmission, CountsWhatIsServedBeforeAndWhatWouldBeLate) { expect_the_rule(false, 30, 30.0); }

TEST(PoolAdmission, CountsReleasedDevicesFromWhenTheyAreThere) { expect_the_rule(true, 20, 20.0); }

// A pool whose runs take as long as predicted, and jobs that come one after another. `refused` sees each new job before
// it is submitted, with what waits, and says whether it must be refused.
struct Exact {
  Exact(std::vector<double> all, Placement placement)
      : seconds(std::move(all)), free(seconds.size()), box(seconds, {.placement = placement, .margin = 1.0}, kind()) {}
  static PoolKind kind() { return {.name = "work", .queue_limit = 1000}; }

  template <class Refused>
  void submit(double at, double deadline, const Refused& refused) {
    while (!runs.empty() && runs.begin()->first <= at) {
      const auto [end, start] = *runs.begin();
      runs.erase(runs.begin());
      now = end;
      obey(box.finish(end, start));
    }
    now = at;
    const std::optional<bool> expected = refused(*this, at + deadline);
    const JobId id = box.submit(at, {.deadline_seconds = deadline});
    const bool rejected = !box.last.ends.empty() && box.last.ends.back().job == id &&
                          box.last.ends.back().outcome == JobOutcome::rejected;
    right = right && rejected == expected.value_or(rejected);
    (rejected ? turned_away : taken) += 1;
    if (!rejected) waiting[id] = at + deadline;
    obey(box.last);
  }
  void obey(const PoolDecisions& decisions) {
    for (const PoolEnd& end : decisions.ends) expired += end.outcome == JobOutcome::expired ? 1 : 0;
    for (const PoolStart& start : decisions.starts) {
      waiting.erase(start.jobs.front());
      const std::size_t d = start.devices.front();
      free[d] = now + seconds[d];
      runs.emplace(free[d], start);
    }
  }

  std::vector<double> seconds;
  std::vector<double> free;
  Box box;
  std::multimap<double, PoolStart> runs;
  std::map<JobId, double> waiting;  // its deadline
  double now = 0.0;
  int taken = 0;
  int turned_away = 0;
  int expired = 0;
  bool right = true;
};

// On one device: whatever the order in which these run, one is late.
std::optional<bool> no_order_ends_all(const Exact& exact, double deadline) {
  std::vector<double> all{deadline};
  for (const auto& [id, one] : exact.waiting) all.push_back(one);
  if (all.size() > 6) return std::nullopt;
  std::ranges::sort(all);
  do {
    double end = std::max(exact.now, exact.free[0]);
    if (std::ranges::all_of(all, [&](double one) { return (end += exact.seconds[0]) <= one; })) return false;
  } while (std::ranges::next_permutation(all).found);
  return true;
}

TEST(PoolAdmission, OnOneDeviceRefusesExactlyWhatNoOrderEndsInTimeBesideTheOthers) {
  int taken = 0;
  int turned_away = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Draws draws(seed);
    Exact exact({draws.real(0.5, 1.5)}, Placement::automatic);
    double now = 0.0;
    for (int job = 0; job < 60; ++job) {
      exact.submit(now += draws.real(0.0, 1.2), draws.real(0.6, 7.0), no_order_ends_all);
      ASSERT_TRUE(exact.right) << "seed " << seed << " job " << job;
      ASSERT_EQ(exact.expired, 0) << "seed " << seed << " job " << job;
    }
    taken += exact.taken;
    turned_away += exact.turned_away;
  }
  EXPECT_GT(taken, 3000);
  EXPECT_GT(turned_away, 3000);
}

TEST(PoolAdmission, AsksWhatHasBatchesOrIsAGangOrBoundOnlyForWhatIsServedBefore) {
  const auto refused = [](PoolKind kind, Placement placement, std::int64_t gang) {
    Box box({1.0, 1.0}, {.placement = placement, .margin = 1.0}, std::move(kind));
    for (int job = 0; job < 2; ++job) (void)box.submit(0.0);  // both devices are busy until 1
    (void)box.submit(0.0, {.deadline_seconds = 1.9, .gang = gang});
    return !box.last.ends.empty();
  };
  EXPECT_TRUE(refused({.name = "work"}, Placement::automatic, 1));
  EXPECT_FALSE(refused({.name = "work", .sizes = {1, 2}}, Placement::automatic, 1));
  EXPECT_FALSE(refused({.name = "work"}, Placement::automatic, 2));
  EXPECT_FALSE(refused({.name = "work"}, Placement::least_outstanding, 1));
}

TEST(PoolAdmission, RefusesNothingWhileADevicePauses) {
  Box box({1.0}, {.margin = 1.0});
  (void)box.pool.retire(0.0, 0, true);
  (void)box.submit(0.0, {.deadline_seconds = 1.5});
  (void)box.submit(0.0, {.deadline_seconds = 1.6});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_EQ(box.pool.restore(0.1, 0).starts.size(), 1U);
}

TEST(PoolAdmission, NoJobThatWasTakenExpiresOnUnequalDevicesIfRunsTakeAsLongAsPredicted) {
  int turned_away = 0;
  for (const Placement placement : {Placement::automatic, Placement::any}) {
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      Draws draws(seed);
      std::vector<double> seconds;
      double rate = 0.0;
      for (std::size_t d = 0, count = draws.count(2, 5); d < count; ++d) {
        seconds.push_back(draws.real(0.5, 4.0));
        rate += 1.0 / seconds.back();
      }
      Exact exact(seconds, placement);
      double now = 0.0;
      for (int job = 0; job < 200; ++job) {
        now += draws.real(0.0, 1.6 / rate);
        exact.submit(now, draws.real(0.5, 12.0), [](const Exact&, double) { return std::nullopt; });
        ASSERT_EQ(exact.expired, 0) << "seed " << seed << " job " << job;
      }
      turned_away += exact.turned_away;
      EXPECT_GT(exact.taken, 50);
    }
  }
  EXPECT_GT(turned_away, 5000);
}

}  // namespace
}  // namespace paceline::plan::testing

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "draws.hpp"

namespace paceline::plan::testing {
namespace {

constexpr double kForEver = std::numeric_limits<double>::infinity();

// Times are multiples of 1/8, so that sums in another order have the same bits.
struct SmallPool {
  SmallPool(Draws& draws, std::vector<std::int64_t> sizes, bool fixed, PoolOptions options = {}) : pool(options) {
    const std::size_t devices = draws.count(1, 4);
    kind = pool.add_kind({.name = "work", .sizes = std::move(sizes), .queue_limit = 1000});
    for (std::size_t d = 0; d < devices; ++d) {
      const std::string name = "d" + std::to_string(d);
      (void)pool.add_device(0.0, {.name = name, .device_class = name});
      models.push_back(CostModel::affine(fixed ? 0.125 * static_cast<double>(draws.integer(0, 16)) : 0.0,
                                         0.125 * static_cast<double>(draws.integer(1, 32))));
      (void)pool.measure(0.0, d, kind, models.back(), 3);
      free_at.push_back(0.0);
    }
  }
  PoolState pool;
  std::size_t kind = 0;
  std::vector<CostModel> models;
  std::vector<double> free_at;  // predicted; <= now: idle
};

// The rule of the header, written as it reads.
bool declines_by_rule(const SmallPool& small, std::size_t device, double waiting, const std::vector<bool>& busy) {
  double sum = 0.0;
  const double own = small.models[device].seconds(1);
  for (std::size_t e = 0; e < small.models.size(); ++e) {
    if (busy[e] && small.models[e].seconds(1) < own) sum += own / small.models[e].seconds(1) - 1.0;
  }
  return waiting <= 0.5 * sum * (1.0 + 1e-9);  // a tie, whatever the rounding of the quotients
}

TEST(PoolOracle, AutomaticPlacementDeclinesExactlyByTheRule) {
  int declined = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Draws draws(seed);
    SmallPool small(draws, {1}, false);
    std::vector<bool> busy(small.models.size(), false);
    std::map<RunId, std::size_t> runs;
    std::int64_t waiting = 0;
    double now = 0.0;
    const auto check = [&](const PoolDecisions& decisions) {
      std::vector<std::size_t> order(small.models.size());
      for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
      std::ranges::stable_sort(order, {}, [&](std::size_t d) { return small.models[d].seconds(1); });
      std::vector<std::size_t> expected;
      for (bool again = true; again;) {
        again = false;
        for (const std::size_t d : order) {
          if (busy[d] || waiting == 0 || declines_by_rule(small, d, static_cast<double>(waiting), busy)) continue;
          expected.push_back(d);
          busy[d] = again = true;
          --waiting;
          break;
        }
      }
      std::vector<std::size_t> started;
      for (const PoolStart& start : decisions.starts) {
        started.push_back(start.devices.front());
        runs[start.run] = start.devices.front();
      }
      declined += static_cast<int>(decisions.declines.size());
      return started == expected;
    };
    for (int event = 0; event < 40; ++event) {
      now += 0.01;  // no device waits long enough for a probe
      if (draws.chance(0.6) || runs.empty()) {
        ++waiting;
        JobId id{};
        ASSERT_TRUE(check(small.pool.submit(now, {.kind = small.kind}, id))) << "seed " << seed;
      } else {
        auto run = runs.begin();
        std::advance(run, draws.integer(0, std::ssize(runs) - 1));
        busy[run->second] = false;
        const RunId id = run->first;
        runs.erase(run);
        ASSERT_TRUE(check(small.pool.finish(now, id, RunResult::completed, 1.0))) << "seed " << seed;
      }
    }
  }
  EXPECT_GT(declined, 1000);
}

// The least seconds in which a device runs `count` requests in batches of at most `largest`, over all ways to cut them.
double best_seconds(const CostModel& model, std::int64_t count, std::int64_t largest) {
  if (count == 0) return 0.0;
  double best = kForEver;
  for (std::int64_t first = 1; first <= std::min(count, largest); ++first)
    best = std::min(best, model.seconds(first) + best_seconds(model, count - first, largest));
  return best;
}

// The least time in which the devices serve `count` requests, over all ways to hand them out.
double least_time(const std::vector<CostModel>& models, const std::vector<double>& free, std::int64_t count,
                  std::int64_t largest, std::size_t from = 0) {
  if (from == models.size()) return count == 0 ? 0.0 : kForEver;
  double best = kForEver;
  for (std::int64_t own = 0; own <= count; ++own) {
    const double here = own == 0 ? 0.0 : free[from] + best_seconds(models[from], own, largest);
    if (here >= best) break;
    best = std::min(best, std::max(here, least_time(models, free, count - own, largest, from + 1)));
  }
  return best;
}

TEST(PoolOracle, BatchesAreWhatTheLeastTimeGivesADevice) {
  constexpr std::int64_t largest = 3;
  int nothing = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Draws draws(seed);
    SmallPool small(draws, {1, 2, 3}, true);
    double now = 0.0;
    std::map<RunId, std::size_t> runs;
    std::map<RunId, double> predicted;
    for (int round = 0; round < 25; ++round) {
      now += 0.125;
      PoolDecisions decisions;
      // Runs end early, late or never, so that busy devices are also overdue.
      if (runs.empty() || draws.chance(0.7) || small.pool.waiting() > 6) {
        if (small.pool.waiting() > 6 && runs.empty()) break;
        JobId id{};
        if (small.pool.waiting() <= 6) decisions = small.pool.submit(now, {.kind = small.kind}, id);
      }
      if (decisions.starts.empty() && !runs.empty() && draws.chance(0.5)) {
        auto run = runs.begin();
        std::advance(run, draws.integer(0, std::ssize(runs) - 1));
        const RunId ended = run->first;
        small.free_at[run->second] = 0.0;
        runs.erase(run);
        decisions =
            small.pool.finish(now, ended, RunResult::completed, predicted.at(ended));  // so sizes stay on the line
      }
      for (const PoolStart& start : decisions.starts) predicted[start.run] = start.predicted_seconds;
      std::int64_t waiting = small.pool.waiting();
      for (const PoolStart& start : decisions.starts) waiting += std::ssize(start.jobs);
      std::vector<std::size_t> order(small.models.size());
      for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
      std::ranges::stable_sort(order, {}, [&](std::size_t d) { return small.models[d].seconds(1); });
      std::vector<std::pair<std::size_t, std::int64_t>> expected;
      for (bool again = true; again;) {
        again = false;
        for (const std::size_t d : order) {
          if (waiting == 0 || small.free_at[d] > 0.0) continue;
          std::vector<double> free;
          for (const double at : small.free_at) free.push_back(std::max(at - now, 0.0));
          const double time = least_time(small.models, free, waiting, largest);
          std::int64_t size = std::min(largest, waiting);
          while (size > 0 && best_seconds(small.models[d], size, largest) > time) --size;
          if (size == 0) {
            ++nothing;
            continue;
          }
          expected.emplace_back(d, size);
          waiting -= size;
          small.free_at[d] = now + small.models[d].seconds(size);
          again = true;
          break;
        }
      }
      std::vector<std::pair<std::size_t, std::int64_t>> started;
      for (const PoolStart& start : decisions.starts) {
        started.emplace_back(start.devices.front(), std::ssize(start.jobs));
        runs[start.run] = start.devices.front();
      }
      ASSERT_EQ(started, expected) << "seed " << seed << " round " << round;
    }
  }
  EXPECT_GT(nothing, 100);
}

TEST(PoolOracle, TheMarginIsTheNinetyPercentQuantileOfActualOverPredicted) {
  Draws draws(1);
  SmallPool small(draws, {1}, false, {.placement = Placement::any});
  std::vector<double> ratios;
  for (int run = 0; run < 128; ++run) {
    JobId id{};
    const PoolStart start = small.pool.submit(run, {.kind = small.kind}, id).starts.at(0);
    ratios.push_back(draws.real(0.5, 2.0));
    (void)small.pool.finish(run, start.run, RunResult::completed, ratios.back() * start.predicted_seconds);
    if (run < 8) {
      EXPECT_EQ(small.pool.margin(small.kind), 1.3);
    }
  }
  std::ranges::sort(ratios);
  EXPECT_NEAR(small.pool.margin(small.kind), ratios[128 * 9 / 10], 1e-12);
}

}  // namespace
}  // namespace paceline::plan::testing

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>
#include <paceline/plan/pool_scale.hpp>

#include "draws.hpp"

namespace paceline::plan {
namespace {

using testing::Draws;

constexpr double kEndless = std::numeric_limits<double>::infinity();

/// The mean wait in front of n equal servers with arrivals at random and exponential services (Erlang C), in services.
double erlang_wait(int n, double load) {
  double blocked = 1.0;  // Erlang B, by its recursion
  for (int i = 1; i <= n; ++i) blocked = load * n * blocked / (i + load * n * blocked);
  return blocked / (1.0 - load + load * blocked) / (n * (1.0 - load));
}

TEST(PredictedWait, IsThatOfQueueingTheory) {
  for (int n = 1; n <= 32; n *= 2) {
    const std::vector<double> speeds(static_cast<std::size_t>(n), 2.0);
    for (const double load : {0.5, 0.7, 0.9, 0.97}) {
      const ScaleDemand demand{.work_per_second = load * 2.0 * n, .run_seconds = 0.1};
      const double service = 0.1 / 2.0;
      EXPECT_NEAR(predicted_wait(speeds, demand) / service, erlang_wait(n, load), 0.03 + 0.03 * erlang_wait(n, load))
          << n << " servers, load " << load;
    }
  }
}

TEST(PredictedWait, CountsWhatWaitsAndIsEndlessWhereTooMuchComes) {
  const std::vector<double> speeds = {1.0, 0.5};
  EXPECT_DOUBLE_EQ(predicted_wait(speeds, {.backlog = 3.0}), 2.0);
  EXPECT_EQ(predicted_wait(speeds, {.work_per_second = 1.5, .run_seconds = 0.1}), kEndless);
  EXPECT_EQ(predicted_wait({}, {}), kEndless);
}

TEST(PredictedWait, GrowsWithWhatRunsTakeAndHowTheyVary) {
  const std::vector<double> speeds = {1.0, 1.0};
  const ScaleDemand jobs{.work_per_second = 1.0, .run_seconds = 0.01};
  ScaleDemand batches = jobs;
  batches.run_seconds = 0.32;
  EXPECT_NEAR(predicted_wait(speeds, batches), 32.0 * predicted_wait(speeds, jobs), 1e-12);
  batches.overhead = 10.0;  // small ones, so that devices are always busy
  EXPECT_NEAR(predicted_wait(speeds, batches), 0.32, 1e-12);
  ScaleDemand equal = jobs;
  equal.variability = 0.5;
  EXPECT_NEAR(predicted_wait(speeds, equal), 0.5 * predicted_wait(speeds, jobs), 1e-12);
}

TEST(FillingWait, IsUntilABatchIsFullOrItsFirstRequestHasWaited) {
  EXPECT_DOUBLE_EQ(filling_wait(0.0, 0.05, 8.0), 0.05);
  EXPECT_LT(filling_wait(40.0, 0.05, 8.0), 0.05);
  EXPECT_GT(filling_wait(40.0, 0.05, 8.0), 0.025);
  EXPECT_DOUBLE_EQ(filling_wait(1000.0, 0.05, 8.0), 7.0 / 2000.0);
  EXPECT_DOUBLE_EQ(filling_wait(10.0, 0.05, 1.0), 0.0);
}

// Requests of a kind that runs in batches come at random: the wait that is predicted from what the pool has measured,
// and the wait.
std::pair<double, double> waits_of_batches(double jobs_per_second, const CostModel& model, std::size_t devices) {
  PoolState pool;
  for (std::size_t d = 0; d < devices; ++d) (void)pool.add_device(0.0, {.name = "d" + std::to_string(d)});
  const std::size_t kind = pool.add_kind({.name = "score", .sizes = batch_sizes(32), .queue_limit = 100000});
  for (std::size_t d = 0; d < devices; ++d) (void)pool.measure(0.0, d, kind, model, 3);
  Draws draws(3);
  std::vector<std::tuple<double, RunId, double>> ends;
  std::vector<double> submitted;
  double now = 0.0, next = 0.0, waited = 0.0, arrived = 0.0;
  Scaler scaler({.wait_seconds = 1.0});
  const std::vector<ScaleDevice> rows(devices);
  const auto obey = [&](const PoolDecisions& decisions) {
    for (const PoolStart& start : decisions.starts) {
      for (const JobId id : start.jobs) waited += now - submitted[static_cast<std::uint64_t>(id) / (1U << 22U) - 1];
      ends.emplace_back(now + start.predicted_seconds, start.run, start.predicted_seconds);
    }
    std::ranges::sort(ends, std::greater<>());
  };
  for (double tick = 1.0; tick < 200.0; tick += 1.0) {
    for (;;) {
      now = std::min(next, ends.empty() ? next : std::get<0>(ends.back()));
      if (now >= tick) break;
      JobId id{};
      if (!ends.empty() && std::get<0>(ends.back()) == now) {
        const auto [end, run, seconds] = ends.back();
        ends.pop_back();
        obey(pool.finish(now, run, RunResult::completed, seconds));
      } else {
        next = now - std::log(1.0 - draws.real(0.0, 1.0)) / jobs_per_second;
        submitted.push_back(now);
        obey(pool.submit(now, {.kind = kind}, id));
      }
    }
    const PoolLoad load = pool.loads()[kind];
    const double came = load.arrived - std::exchange(arrived, load.arrived);
    const double runs = load.run_jobs > 0.0 ? came / load.run_jobs : 0.0;
    const double one = load.rates[0];  // jobs a second
    (void)scaler.decide(
        rows, {1.0, came / one, came, 0.0, runs, runs * load.run_work / one, runs * load.run_square / (one * one)});
  }
  ScaleDemand demand = scaler.demand();
  demand.backlog = 0.0;
  return {predicted_wait(std::vector<double>(devices, 1.0), demand), waited / static_cast<double>(submitted.size())};
}

TEST(PredictedWait, IsThatBehindBatchesThatRun) {
  const CostModel flat = CostModel::affine(0.09, 0.0003);  // a request alone takes as long as thirty
  for (const std::size_t devices : {1U, 2U}) {
    for (const double rate : {5.0, 30.0, 100.0}) {
      const auto [predicted, wait] = waits_of_batches(rate, flat, devices);
      EXPECT_GT(predicted, 0.4 * wait) << devices << " devices, " << rate << " requests a second, " << wait << " s";
      EXPECT_LT(predicted, 2.5 * wait + 0.005) << devices << " devices, " << rate << " a second, " << wait << " s";
    }
  }
}

}  // namespace
}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
//
// The cost of a decision: after every step the balancer records the step's timings and plans the next step.
//   benchmark_balance --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <cstddef>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/plan/random.hpp>

namespace paceline::balance {
namespace {

constexpr std::int64_t kBatchSize = 512;
constexpr double kNoise = 0.03;

Balancer balancer(std::int64_t devices) {
  BalancerOptions options;
  for (std::int64_t i = 0; i < devices; ++i) options.devices.push_back({"host:" + std::to_string(i), "host", {}});
  return Balancer(options);
}

/// One step as the engine reports it: a large micro-batch and `corrections` small ones on every device.
StepTimings timings(const StepPlan& plan, std::int64_t corrections, double slowdown, plan::Random& random) {
  StepTimings result;
  for (std::size_t i = 0; i < plan.shares.size(); ++i) {
    std::vector<MicroBatchTiming>& device = result.devices.emplace_back();
    const double slower = i == 0 ? slowdown : 1.0;
    const auto add = [&](std::int64_t items) {
      const double seconds = slower * (4e-3 + 1e-4 * static_cast<double>(items));
      if (items > 0) device.push_back({.items = items, .seconds = seconds * (1 + kNoise * random.normal())});
    };
    const std::int64_t small = plan.shares[i] / 16;
    add(plan.shares[i] - corrections * small);
    for (std::int64_t k = 0; k < corrections; ++k) add(small);
  }
  return result;
}

/// Measures `record` and `next_plan` together, step after step. Every 100 steps device 0 becomes `slowdown` times
/// slower, or as fast as before.
void decide(benchmark::State& state, double slowdown) {
  Balancer subject = balancer(state.range(0));
  plan::Random random(1, 0, 0);
  StepPlan plan = subject.next_plan(kBatchSize);
  for (auto _ : state) {
    state.PauseTiming();
    const StepTimings measured = timings(plan, state.range(1), plan.step / 100 % 2 == 0 ? 1.0 : slowdown, random);
    state.ResumeTiming();
    subject.record(measured);
    plan = subject.next_plan(kBatchSize);
    benchmark::DoNotOptimize(plan);
  }
}

void decide_quiet(benchmark::State& state) { decide(state, 1.0); }
BENCHMARK(decide_quiet)->ArgNames({"devices", "corrections"})->ArgsProduct({{2, 8, 64}, {0, 3}});

void decide_throttled(benchmark::State& state) { decide(state, 2.0); }
BENCHMARK(decide_throttled)->ArgNames({"devices", "corrections"})->ArgsProduct({{2, 8, 64}, {0, 3}});

void explain(benchmark::State& state) {
  Balancer subject = balancer(state.range(0));
  plan::Random random(1, 0, 0);
  for (int step = 0; step < 50; ++step) subject.record(timings(subject.next_plan(kBatchSize), 0, 1.0, random));
  for (auto _ : state) benchmark::DoNotOptimize(subject.explain());
}
BENCHMARK(explain)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

}  // namespace
}  // namespace paceline::balance

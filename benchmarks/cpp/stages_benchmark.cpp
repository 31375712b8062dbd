// SPDX-License-Identifier: Apache-2.0
//
// How long it takes to plan stages for 2 to 64 devices and 16 to 512 blocks, and how far the planned step is from the
// bound of its stages and from the ideal. Then small unequal boxes: the planned step, and 1F1B on the balanced cut that
// is found first.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <paceline/plan/stages.hpp>

namespace {

using namespace paceline::plan;

constexpr std::int64_t kItemsPerDevice = 16;

/// Unlike blocks, a head of three blocks, devices of 1 to 3 times one speed, and memory for twice a fair part of the
/// model if it is `capped`.
StageProblem problem_of(std::size_t devices, std::size_t blocks, bool capped) {
  std::mt19937_64 random(devices * 1000 + blocks);
  std::uniform_real_distribution<double> part(0.0, 1.0);
  constexpr std::int64_t kParameterBytes = 400'000'000;
  StageProblem problem;
  for (std::size_t i = 0; i < blocks; ++i) {
    const double size = (i + 1 == blocks ? 3.0 : 1.0) * (0.8 + 0.4 * part(random));
    problem.blocks.push_back({.forward_fixed = 1e-4,
                              .forward_per_item = 1e-3 * size,
                              .backward_fixed = 2e-4,
                              .backward_per_item = 2e-3 * size,
                              .parameter_bytes = kParameterBytes,
                              .saved_bytes_per_item = 20'000'000,
                              .boundary_bytes_per_item = 2'000'000,
                              .workspace_bytes_per_item = 10'000'000});
  }
  const auto fair = static_cast<std::int64_t>(blocks / devices + 1) * kParameterBytes;
  for (std::size_t i = 0; i < devices; ++i) {
    problem.devices.push_back({.name = "sim:" + std::to_string(i),
                               .speed = 1.0 + 2.0 * part(random),
                               .memory_bytes = capped ? 2 * fair : StageDevice::kUnlimitedBytes,
                               .memory_space = i});
  }
  problem.batch_size = kItemsPerDevice * static_cast<std::int64_t>(devices);
  problem.link = {.latency_seconds = 1e-5, .bytes_per_second = 25e9};
  return problem;
}

void plan(benchmark::State& state, bool capped) {
  const StageProblem problem =
      problem_of(static_cast<std::size_t>(state.range(0)), static_cast<std::size_t>(state.range(1)), capped);
  StagePlan best;
  for (auto _ : state) {
    best = plan_stages(problem);
    benchmark::DoNotOptimize(best);
  }
  state.counters["stages"] = static_cast<double>(best.cuts.size());
  state.counters["micro_batches"] = static_cast<double>(best.sizes.size());
  state.counters["step_over_bound"] = best.seconds / best.bound_seconds;
  state.counters["step_over_ideal"] = best.seconds / best.ideal_seconds;
}

void with_room(benchmark::State& state) { plan(state, false); }
void with_tight_memory(benchmark::State& state) { plan(state, true); }

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"devices", "blocks"})->Unit(benchmark::kMillisecond);
  for (const std::int64_t devices : {2, 4, 8, 16, 32, 64})
    for (const std::int64_t blocks : {16, 80, 512})
      if (blocks >= devices) benchmark->Args({devices, blocks});
}

BENCHMARK(with_room)->Apply(sizes);
BENCHMARK(with_tight_memory)->Apply(sizes);

/// 1F1B on the first cut and order whose slowest stage is quickest.
double balanced(const StageProblem& problem, std::int64_t micro_batches) {
  const std::size_t blocks = problem.blocks.size();
  const std::size_t devices = problem.devices.size();
  std::vector<std::size_t> order(devices);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<std::size_t> best_cuts;
  std::vector<std::size_t> best_order;
  double best = 0.0;
  do {
    std::vector<std::size_t> cuts(devices);
    std::iota(cuts.begin(), cuts.end(), std::size_t{0});
    for (;;) {
      double slowest = 0.0;
      for (std::size_t i = 0; i < devices; ++i) {
        double work = 0.0;
        for (std::size_t block = cuts[i]; block < (i + 1 < devices ? cuts[i + 1] : blocks); ++block)
          work += problem.blocks[block].forward_per_item + problem.blocks[block].backward_per_item;
        slowest = std::max(slowest, work / problem.devices[order[i]].speed);
      }
      if (best_cuts.empty() || slowest < best * (1.0 - 1e-12)) {
        best = slowest;
        best_cuts = cuts;
        best_order = order;
      }
      // The next cuts in lexicographic order.
      std::size_t last = devices;
      while (--last > 0 && cuts[last] == blocks - (devices - last)) {
      }
      if (last == 0) break;
      ++cuts[last];
      for (std::size_t i = last + 1; i < devices; ++i) cuts[i] = cuts[i - 1] + 1;
    }
  } while (std::next_permutation(order.begin(), order.end()));
  return evaluate_stages(problem, best_cuts, best_order, micro_batches, one_f_one_b(devices, micro_batches)).seconds;
}

/// 16 blocks, the last one three times as heavy, on devices of random speeds between 1 and 3.
void unequal_boxes(benchmark::State& state) {
  const auto devices = static_cast<std::size_t>(state.range(0));
  const std::int64_t micro_batches = state.range(1);
  constexpr int kBoxes = 200;
  double planned = 0.0;
  double plain = 0.0;
  for (auto _ : state) {
    std::mt19937_64 random(7);
    std::uniform_real_distribution<double> speed(1.0, 3.0);
    planned = plain = 0.0;
    for (int box = 0; box < kBoxes; ++box) {
      StageProblem problem;
      problem.blocks.assign(16, {.forward_per_item = 1.0, .backward_per_item = 2.0});
      problem.blocks.back() = {.forward_per_item = 3.0, .backward_per_item = 6.0};
      for (std::size_t i = 0; i < devices; ++i) problem.devices.push_back({.speed = speed(random), .memory_space = i});
      problem.batch_size = micro_batches;
      const StagePlan best = plan_stages(problem, {.micro_batches = micro_batches});
      planned += best.seconds / best.ideal_seconds / kBoxes;
      plain += balanced(problem, micro_batches) / best.ideal_seconds / kBoxes;
    }
  }
  state.counters["planned_over_ideal"] = planned;
  state.counters["balanced_1f1b_over_ideal"] = plain;
}

BENCHMARK(unequal_boxes)
    ->ArgNames({"devices", "micro_batches"})
    ->Args({2, 8})
    ->Args({3, 8})
    ->Args({3, 16})
    ->Unit(benchmark::kMillisecond);

}  // namespace

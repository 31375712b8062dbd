// SPDX-License-Identifier: Apache-2.0
//
// The cost of a plan. It is made every step, so it must be short beside the shortest step (a millisecond).
//   benchmark_plan --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include <paceline/plan/corrections.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::plan {
namespace {

// Unequal devices: milliseconds of fixed cost and tenths of a millisecond per item, all different.
std::vector<CostModel> affine_box(std::int64_t devices) {
  std::vector<CostModel> models;
  for (std::int64_t i = 0; i < devices; ++i) {
    const auto unequal = static_cast<double>(i * 7 % 16);
    models.push_back(CostModel::affine(1e-3 * (3.0 + 0.13 * unequal), 1e-4 * (1.0 + 0.171 * unequal)));
  }
  return models;
}

void run(benchmark::State& state, std::int64_t batch_size, const std::vector<CostModel>& models,
         const SplitOptions& options) {
  for (auto _ : state) benchmark::DoNotOptimize(split_batch(batch_size, models, options));
}

void split_affine(benchmark::State& state) { run(state, state.range(1), affine_box(state.range(0)), {}); }
BENCHMARK(split_affine)->ArgNames({"devices", "batch"})->ArgsProduct({{2, 8, 64}, {512, 4096}})->Args({8, 1'000'000});

void split_equal(benchmark::State& state) {
  run(state, 4096, std::vector<CostModel>(static_cast<std::size_t>(state.range(0)), CostModel::affine(4e-3, 1e-4)), {});
}
BENCHMARK(split_equal)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

void split_with_startup(benchmark::State& state) {
  SplitOptions options;
  for (std::int64_t i = 0; i < state.range(0); ++i)
    options.limits.push_back({.startup_seconds = 1e-3 * static_cast<double>(i % 3)});
  run(state, 4096, affine_box(state.range(0)), options);
}
BENCHMARK(split_with_startup)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

void split_keeping_previous(benchmark::State& state) {
  const std::vector<CostModel> models = affine_box(state.range(0));
  run(state, 4096, models, {.previous = split_batch(4096, models).shares});
}
BENCHMARK(split_keeping_previous)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

void split_leaving_previous(benchmark::State& state) {
  std::vector<CostModel> models = affine_box(state.range(0));
  const SplitOptions options{.previous = split_batch(4096, models).shares};
  models.front() = models.front().scaled(2.0);
  run(state, 4096, models, options);
}
BENCHMARK(split_leaving_previous)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

void split_in_grains_with_remainder(benchmark::State& state) {
  run(state, 4099, affine_box(state.range(0)), {.granularity = 8});
}
BENCHMARK(split_in_grains_with_remainder)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

void split_with_reduction(benchmark::State& state) {
  SplitOptions options;
  for (std::int64_t k = 0; k <= state.range(0); ++k) options.reduction_seconds.push_back(1e-3 * static_cast<double>(k));
  run(state, 4096, affine_box(state.range(0)), options);
}
BENCHMARK(split_with_reduction)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

// Every device is idle or has at least 400 items. So at most ten devices can work, and subsets are searched.
void split_with_minimums(benchmark::State& state) {
  SplitOptions options;
  options.limits.assign(static_cast<std::size_t>(state.range(0)), {.minimum = 400});
  run(state, 2000, affine_box(state.range(0)), options);
}
BENCHMARK(split_with_minimums)->ArgName("devices")->Arg(2)->Arg(8)->Arg(16);

void claim_correction(benchmark::State& state) {
  std::vector<TailDevice> devices;
  for (const CostModel& model : affine_box(state.range(0))) devices.push_back({.model = model});
  for (auto _ : state) benchmark::DoNotOptimize(next_correction(600, devices, 0, 16));
}
BENCHMARK(claim_correction)->ArgName("devices")->Arg(2)->Arg(8)->Arg(64);

}  // namespace
}  // namespace paceline::plan

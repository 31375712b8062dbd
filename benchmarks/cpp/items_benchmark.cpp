// SPDX-License-Identifier: Apache-2.0
//
// The cost of splitting items of unequal cost, and the distance of the split from the lower bound (counter
// gap_percent). A split is made every step, so it must be short beside the shortest step (a millisecond). Lengths are
// lognormal, like those of texts.
//   benchmark_items --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <paceline/plan/items.hpp>

namespace paceline::plan {
namespace {

std::vector<double> lengths(std::int64_t items) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> length(5.5, 0.8);
  std::vector<double> tokens;
  for (std::int64_t i = 0; i < items; ++i) tokens.push_back(std::ceil(length(random)));
  return tokens;
}

std::vector<double> squares(std::int64_t items) {
  std::vector<double> costs = lengths(items);
  for (double& cost : costs) cost *= cost;
  return costs;
}

std::vector<double> any_cost(std::int64_t items) {
  std::vector<double> costs = lengths(items);
  for (double& cost : costs) cost = 0.37 * cost + 1e-4 * cost * cost;
  return costs;
}

std::vector<LoadModel> equal_box(std::int64_t devices) { return std::vector<LoadModel>(devices); }

// All devices differ; the slowest is about 3.5 times slower than the fastest.
std::vector<LoadModel> unequal_box(std::int64_t devices) {
  std::vector<LoadModel> models;
  for (std::int64_t i = 0; i < devices; ++i) {
    const auto unequal = static_cast<double>(i * 7 % 16);
    models.push_back({1e-3 * (3.0 + 0.13 * unequal), 1e-6 * (1.0 + 0.171 * unequal)});
  }
  return models;
}

void run(benchmark::State& state, const std::vector<double>& costs, const std::vector<LoadModel>& models,
         double tolerance = kItemTolerance) {
  for (auto _ : state) benchmark::DoNotOptimize(split_items(costs, models, tolerance));
  state.counters["gap_percent"] = 100.0 * split_items(costs, models, tolerance).gap();
}

using Costs = std::vector<double> (*)(std::int64_t);
using Box = std::vector<LoadModel> (*)(std::int64_t);

void split(benchmark::State& state, Costs costs, Box box) { run(state, costs(state.range(0)), box(state.range(1))); }

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"items", "devices"})->Args({1024, 8});
  benchmark->Args({64, 8})->Args({256, 4})->Args({16384, 8})->Args({16384, 64});
}
BENCHMARK_CAPTURE(split, tokens_on_equal, lengths, equal_box)->Apply(sizes);
BENCHMARK_CAPTURE(split, tokens_on_unequal, lengths, unequal_box)->Apply(sizes);
BENCHMARK_CAPTURE(split, squares_on_equal, squares, equal_box)->Apply(sizes);
BENCHMARK_CAPTURE(split, squares_on_unequal, squares, unequal_box)->Apply(sizes);
BENCHMARK_CAPTURE(split, any_cost_on_unequal, any_cost, unequal_box)->Apply(sizes);

void split_without_tolerance(benchmark::State& state) {
  run(state, any_cost(state.range(0)), unequal_box(state.range(1)), 0.0);
}
BENCHMARK(split_without_tolerance)
    ->ArgNames({"items", "devices"})
    ->Args({12, 4})
    ->Args({12, 8})
    ->Args({64, 8})
    ->Args({1024, 8});

// Longest processing time alone: with this tolerance the search ends at once.
void split_without_search(benchmark::State& state) {
  run(state, lengths(state.range(0)), equal_box(state.range(1)), 1e9);
}
BENCHMARK(split_without_search)->ArgNames({"items", "devices"})->Args({1024, 8})->Args({16384, 64});

}  // namespace
}  // namespace paceline::plan

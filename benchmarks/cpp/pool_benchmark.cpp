// SPDX-License-Identifier: Apache-2.0
//
// The cost of a pool's decision, with jobs one by one and in batches of at most 64, without tenants and with up to
// 1,000 that all have jobs; and the growth of a simulation of a million requests with the devices.
//   benchmark_pool --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>
#include <paceline/sim/pool.hpp>

namespace paceline::plan {
namespace {

enum Jobs : std::int64_t { plain, deadlines, padded };  // half of them with a deadline; each with a cost of its own

// All devices, of four classes, are busy, and as many jobs wait as is asked for.
class Box {
 public:
  explicit Box(const benchmark::State& state) : jobs_(state.range(3)), tenants_(state.range(4)) {
    PoolKind kind{.name = "work", .padded = jobs_ == padded, .queue_limit = std::numeric_limits<std::int64_t>::max()};
    for (std::int64_t size = 2; size <= state.range(2); size *= 2) {
      if (size > 2) kind.sizes.push_back(size * 3 / 4);
      kind.sizes.push_back(size);
    }
    (void)pool.add_kind(std::move(kind));
    for (std::int64_t d = 0; d < state.range(0); ++d) {
      (void)pool.add_device(0.0, {.name = "device", .device_class = std::to_string(d % 4)});
      (void)pool.measure(0.0, static_cast<std::size_t>(d), 0,
                         CostModel::affine(1e-3, 1e-3 * static_cast<double>(1 + d % 4)), 3);
    }
    for (std::int64_t t = 1; t <= tenants_; ++t)
      (void)pool.add_tenant({.name = std::to_string(t), .weight = static_cast<double>(1 + t % 4)});
    while (pool.waiting() < state.range(1)) (void)submit();
  }

  JobId submit() {
    random_ = random_ * 6364136223846793005U + 1442695040888963407U;
    PoolJob job{.priority = random_ >> 63 != 0 ? Priority::interactive : Priority::normal};
    if (jobs_ == padded) job.cost = static_cast<double>(1 + (random_ >> 40) % 512);
    if (jobs_ == deadlines && (random_ >> 62 & 1) != 0) job.deadline_seconds = 1e6 + static_cast<double>(random_ >> 40);
    if (tenants_ > 0) job.tenant = 1 + (random_ >> 20) % static_cast<std::uint64_t>(tenants_);
    JobId id{};
    take(pool.submit(now += 1e-7, job, id));
    return id;
  }

  // Ends the next run. Returns the seconds of the decision; as many jobs wait afterwards as before.
  double finish() {
    const PoolStart ended = std::exchange(running_[next_++ % running_.size()], running_.back());
    running_.pop_back();
    now += 1e-7;
    const auto begin = std::chrono::steady_clock::now();
    PoolDecisions decisions = pool.finish(now, ended.run, RunResult::completed, ended.predicted_seconds);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    take(std::move(decisions));
    for (std::size_t more = ended.jobs.size(); more > 0; --more) (void)submit();
    return took.count();
  }

  PoolState pool;
  double now = 0.0;

 private:
  void take(PoolDecisions decisions) {
    for (PoolStart& start : decisions.starts) running_.push_back(std::move(start));
  }
  std::int64_t jobs_ = plain;
  std::int64_t tenants_ = 0;
  std::vector<PoolStart> running_;
  std::size_t next_ = 0;
  std::uint64_t random_ = 1;
};

// One run ends, the next one starts.
void finish_and_start(benchmark::State& state) {
  Box box(state);
  for (auto _ : state) state.SetIterationTime(box.finish());
}

// A job that has to wait, and its cancellation.
void submit_and_cancel(benchmark::State& state) {
  Box box(state);
  for (auto _ : state) {
    bool cancelled = false;
    benchmark::DoNotOptimize(box.pool.cancel(box.now, box.submit(), cancelled));
  }
}

// A million requests that come so fast that nearly all of them wait, served on a virtual clock.
void simulate(benchmark::State& state) {
  constexpr std::int64_t requests = 1'000'000;
  sim::PoolSimulationOptions options{
      .speeds = {}, .fixed_seconds = 1e-3, .per_item_seconds = 1e-3, .load = 1e4, .requests = requests};
  for (std::int64_t d = 0; d < state.range(0); ++d) options.speeds.push_back(1.0 / static_cast<double>(1 + d % 4));
  for (std::int64_t size = 2; size <= state.range(1); size *= 2) options.sizes.push_back(size);
  for (auto _ : state) benchmark::DoNotOptimize(sim::simulate_pool(options));
  state.SetItemsProcessed(state.iterations() * requests);
}
BENCHMARK(simulate)
    ->ArgNames({"devices", "batch"})
    ->ArgsProduct({benchmark::CreateRange(2, 1'024, 2), {1, 64}})
    ->Unit(benchmark::kMillisecond);

void arguments(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"devices", "waiting", "batch", "jobs", "tenants"});
  for (const std::int64_t waiting : {1'000, 100'000}) {
    for (const std::int64_t batch : {1, 64}) {
      for (const Jobs jobs : {plain, deadlines, padded}) benchmark->Args({8, waiting, batch, jobs, 0});
    }
  }
  for (const std::int64_t devices : {2, 64, 1'024}) benchmark->Args({devices, 1'000'000, 64, plain, 0});
  for (const std::int64_t tenants : {10, 100, 1'000}) benchmark->Args({8, 100'000, 64, plain, tenants});
}
BENCHMARK(finish_and_start)->Apply(arguments)->UseManualTime();
BENCHMARK(submit_and_cancel)->Apply(arguments);

}  // namespace
}  // namespace paceline::plan

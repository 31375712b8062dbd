// SPDX-License-Identifier: Apache-2.0
//
// The cost of a claim while other devices claim, too. Each thread is a device that only claims, which is the worst
// case. "claim" is the time that a thread waits for one claim.
//   benchmark_claims --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "engine/step/work_queue.hpp"

namespace paceline::internal {
namespace {

std::unique_ptr<WorkQueue> shared_queue;  // of the running benchmark, whose threads share nothing else

/// Claims as often as the loop wants. `make` gives the devices more work than they can claim.
template <class Make>
void claim_all(benchmark::State& state, Make make) {
  if (state.thread_index() == 0) shared_queue = make(static_cast<std::size_t>(state.threads()));
  const auto device = static_cast<std::size_t>(state.thread_index());
  double now = 0.0;
  // The loop begins with a barrier, so every thread sees what the first one has made.
  for ([[maybe_unused]] auto _ : state) {
    const std::optional<MicroBatch> next = shared_queue->claim(device, now += 1e-3);
    if (!next) {
      state.SkipWithError("nothing is left to claim");
      break;
    }
    benchmark::DoNotOptimize(next->begin);
  }
  if (state.thread_index() == 0) shared_queue.reset();  // the loop also ends with a barrier
}

constexpr std::int64_t kEndless = std::int64_t{1} << 40;

std::vector<plan::CostModel> models(std::size_t devices) {
  return std::vector<plan::CostModel>(devices, plan::CostModel::affine(1e-4, 1e-3));
}

/// Micro-batches of a fixed size from each device's own share.
void claim_own(benchmark::State& state) {
  claim_all(state, [](std::size_t devices) {
    StepOptions options;
    options.shares.assign(devices, kEndless);
    options.models = models(devices);
    options.micro_batch = 1;
    return WorkQueue::of(options);
  });
}

/// The first device has nearly all items, and the other devices take over what it has not begun.
void claim_of_others(benchmark::State& state) {
  claim_all(state, [](std::size_t devices) {
    StepOptions options;
    options.shares.assign(devices, 1);
    options.shares.front() = kEndless;
    options.models = models(devices);
    options.micro_batch = 1;
    return WorkQueue::of(options);
  });
}

void threads(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseRealTime()->Threads(1)->Threads(2)->Threads(8);
}
BENCHMARK(claim_own)->Apply(threads);
BENCHMARK(claim_of_others)->Apply(threads);

}  // namespace
}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
//
// The cost of a step beside its work: handing it to the workers, claims, the reduction, waking the caller, planning.
// The body is empty. All times are per device and step, in two states. Spinning: steps follow each other at once.
// Parked: a pause before each step, which is not counted, lets the workers go to sleep.
//   benchmark_step --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {
namespace {

constexpr std::chrono::milliseconds kPause{2};  // long enough for every worker to go to sleep
constexpr std::int64_t kItemsPerDevice = 64;

DeviceGroup hosts(std::int64_t count) {
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < count; ++i) names.push_back("host:" + std::to_string(i));
  return DeviceGroup(names);
}

/// Times `step`, with a pause before each call if the workers should be parked.
template <class Step>
void measure(benchmark::State& state, Step step) {
  const auto devices = static_cast<double>(state.range(0));
  const bool parked = state.range(1) != 0;
  std::vector<double> times;
  for (int i = 0; i < 100; ++i) step();  // skip the allocations and measurements of the first steps
  for ([[maybe_unused]] auto _ : state) {
    if (parked) std::this_thread::sleep_for(kPause);
    const auto start = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    times.push_back(took.count() / devices);
    state.SetIterationTime(times.back());
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  state.counters["median_us"] = 1e6 * *middle;  // the mean would include the system's own work
}

class EmptyTask final : public GroupTask {
 public:
  void run(DeviceId) noexcept override {}
};

/// The minimum for any step: wake every worker, then the caller.
void round_trip(benchmark::State& state) {
  DeviceGroup group = hosts(state.range(0));
  measure(state, [&] { group.run(std::make_shared<EmptyTask>()); });
}

class EmptyProgram final : public StepProgram {
 public:
  bool run(const MicroBatch&) override { return false; }
};

/// A step with given shares: claims and their record.
void engine_step(benchmark::State& state) {
  const DeviceGroup group = hosts(state.range(0));
  const auto program = std::make_shared<EmptyProgram>();
  StepOptions options;
  options.shares.assign(group.size(), kItemsPerDevice);
  measure(state, [&] { run_step(group, program, options); });
}

/// A user's whole step: planned, measured, reduced (one parameter) and committed.
void trainer(benchmark::State& state, Balance balance) {
  DataParallel trainer{hosts(state.range(0)), {.parameter_count = 1, .balance = balance}};
  const std::int64_t batch = kItemsPerDevice * state.range(0);
  const DataParallel::Body body = [](const MicroBatch&, Replica&) { return 0.0; };
  measure(state, [&] { trainer.step(batch, body); });
}
void trainer_step(benchmark::State& state) { trainer(state, Balance::even); }

/// With automatic balance, which may leave the second device out, because there is nothing to do.
void trainer_step_auto(benchmark::State& state) { trainer(state, Balance::automatic); }

void spinning(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"devices", "parked"})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->ArgsProduct({{1, 2}, {0}});
}
// A fixed number of iterations. Otherwise the pauses, which do not count, would take minutes until enough time has
// counted.
void parked(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"devices", "parked"})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->ArgsProduct({{1, 2}, {1}});
  benchmark->Iterations(300);
}
BENCHMARK(round_trip)->Apply(spinning);
BENCHMARK(round_trip)->Apply(parked);
BENCHMARK(engine_step)->Apply(spinning);
BENCHMARK(engine_step)->Apply(parked);
BENCHMARK(trainer_step)->Apply(spinning);
BENCHMARK(trainer_step)->Apply(parked);
BENCHMARK(trainer_step_auto)->Apply(spinning);
BENCHMARK(trainer_step_auto)->Apply(parked);

}  // namespace
}  // namespace paceline

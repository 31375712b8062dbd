// SPDX-License-Identifier: Apache-2.0
//
// The time of a decision, and the regret of 300 steps, for 2 to 256 simulated devices.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>

namespace {

using namespace paceline;

constexpr std::int64_t kItemsPerDevice = 64;
constexpr std::int64_t kSteps = 300;
constexpr std::int64_t kSettled = 60;

/// Every second device is half as fast, with 2 % noise. Device 0 is 2x slower in the last third of the steps.
sim::BoxOptions box_of(std::size_t devices) {
  sim::BoxOptions box;
  for (std::size_t i = 0; i < devices; ++i) {
    sim::SimDevice device;
    device.name = "sim:" + std::to_string(i);
    device.speed = i % 2 == 0 ? 1.0 : 0.5;
    box.devices.push_back(device);
  }
  box.noise = 0.02;
  box.seed = 1;
  box.throttles = {{0, 2.0, 2 * kSteps / 3, kSteps}};
  return box;
}

/// The balancer on simulated devices, step by step.
class Run {
 public:
  explicit Run(std::size_t devices)
      : box_(box_of(devices)),
        balancer_(options_of(box_)),
        batch_(kItemsPerDevice * static_cast<std::int64_t>(devices)),
        plan_(balancer_.next_plan(batch_)) {}

  /// Runs a step. Returns the seconds for recording it and planning the next one.
  double step() {
    if (step_ >= kSettled && step_ < kSteps) {
      ideal_ += box_.ideal(step_, batch_);
      used_ += box_.makespan(step_, plan_.shares);
    }
    const balance::StepTimings timings = box_.run(step_++, plan_.shares).timings;
    const auto start = std::chrono::steady_clock::now();
    balancer_.record(timings);
    plan_ = balancer_.next_plan(batch_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  /// How much longer than ideal the steps from kSettled on have taken.
  [[nodiscard]] double regret() const { return used_ / ideal_ - 1.0; }

 private:
  static balance::BalancerOptions options_of(const sim::Box& box) {
    balance::BalancerOptions options;
    for (const sim::SimDevice& device : box.options().devices) options.devices.push_back({device.name, "sim", {}});
    return options;
  }

  sim::Box box_;
  balance::Balancer balancer_;
  std::int64_t batch_;
  balance::StepPlan plan_;
  std::int64_t step_ = 0;
  double ideal_ = 0.0;
  double used_ = 0.0;
};

void decide(benchmark::State& state) {
  const auto devices = static_cast<std::size_t>(state.range(0));
  Run whole(devices);
  for (std::int64_t step = 0; step < kSteps; ++step) static_cast<void>(whole.step());
  state.SetLabel("regret " + std::to_string(100.0 * whole.regret()).substr(0, 4) + " %");
  Run run(devices);
  for ([[maybe_unused]] auto _ : state) state.SetIterationTime(run.step());
}

BENCHMARK(decide)->RangeMultiplier(2)->Range(2, 256)->UseManualTime()->Unit(benchmark::kMicrosecond);

}  // namespace

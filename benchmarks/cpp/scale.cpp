// SPDX-License-Identifier: Apache-2.0
//
// Decision time and regret for 2 to 256 simulated devices, as a Markdown table on stdout:
//   benchmark_scale > table.md
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>

namespace {

using namespace paceline;

constexpr std::int64_t kItemsPerDevice = 64;
constexpr std::int64_t kSteps = 300;
constexpr std::int64_t kSettled = 60;

/// Every second device half as fast, 2 % noise; device 0 turns 2x slower for the last third of the steps.
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

struct Row {
  double median_us = 0.0;
  double p99_us = 0.0;
  double regret = 0.0;
};

Row measure(std::size_t devices) {
  sim::Box box(box_of(devices));
  balance::BalancerOptions options;
  for (const sim::SimDevice& device : box.options().devices) options.devices.push_back({device.name, "sim", {}});
  balance::Balancer balancer(options);
  const std::int64_t batch = kItemsPerDevice * static_cast<std::int64_t>(devices);
  std::vector<double> times;
  double ideal = 0.0;
  double used = 0.0;
  balance::StepPlan plan = balancer.next_plan(batch);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    if (step >= kSettled) {
      ideal += box.ideal(step, batch);
      used += box.makespan(step, plan.shares);
    }
    const balance::StepTimings timings = box.run(step, plan.shares).timings;
    const auto start = std::chrono::steady_clock::now();
    balancer.record(timings);
    plan = balancer.next_plan(batch);
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() * 99 / 100], used / ideal - 1.0};
}

}  // namespace

int main() {
  std::puts("| devices | decision, median | 99th percentile | regret |");
  std::puts("| --- | --- | --- | --- |");
  for (std::size_t devices = 2; devices <= 256; devices *= 2) {
    const Row row = measure(devices);
    std::printf("| %zu | %.1f us | %.1f us | %.2f %% |\n", devices, row.median_us, row.p99_us, 100.0 * row.regret);
  }
}

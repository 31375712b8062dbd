// SPDX-License-Identifier: Apache-2.0
//
// GPUs that get their parameters one after the other over one link, and so begin their steps at different times.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::sim {
namespace {

constexpr std::int64_t kArrivalSteps = 300;
constexpr std::int64_t kArrivalSettled = 100;
constexpr std::int64_t kBatch = 256;
constexpr std::size_t kGpus = 4;

/// How much longer steps take than with the best split, once settled. `told`: the arrivals are measured.
/// `lowest_speed`: of the devices, which are all equal, in the end.
double loss(bool told, double& lowest_speed) {
  BoxOptions options;
  balance::BalancerOptions devices;
  for (std::size_t i = 0; i < kGpus; ++i) {
    SimDevice device;
    device.name = "cuda:" + std::to_string(i);
    options.devices.push_back(device);
    devices.devices.push_back({device.name, "gpu", {}});
    if (i > 0) options.late_starts.push_back({i, 0.002 * static_cast<double>(i), 0, kArrivalSteps});
  }
  options.noise = 0.02;
  options.seed = 1;
  Box box(options);
  balance::Balancer balancer(devices);
  double ideal = 0.0;
  double used = 0.0;
  for (std::int64_t step = 0; step < kArrivalSteps; ++step) {
    const balance::StepPlan plan = balancer.next_plan(kBatch);
    if (step >= kArrivalSettled) {
      ideal += box.ideal(step, kBatch);
      used += box.makespan(step, plan.shares);
    }
    balance::StepTimings timings = box.run(step, plan.shares).timings;
    if (!told) timings.startup_seconds.clear();
    balancer.record(timings);
  }
  lowest_speed = 1.0;
  for (const balance::DeviceReport& each : balancer.report().devices) lowest_speed = std::min(lowest_speed, each.speed);
  return used / ideal - 1.0;
}

TEST(Arrival, IsAPartOfThePlanAndNotOfTheSpeed) {
  double lowest_speed = 0.0;
  EXPECT_LE(loss(true, lowest_speed), 0.02);
  EXPECT_GE(lowest_speed, 0.97);
  EXPECT_GE(loss(false, lowest_speed), 0.05) << "what nobody measures is lost";
}

}  // namespace
}  // namespace paceline::sim

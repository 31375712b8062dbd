// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::sim {
namespace {

class Scale : public testing::TestWithParam<std::size_t> {};

TEST_P(Scale, LosesAtMostOnePercentOnceSettledAThrottleIncluded) {
  constexpr std::int64_t kSteps = 300;
  constexpr std::int64_t kSettled = 60;
  BoxOptions options;
  balance::BalancerOptions devices;
  for (std::size_t i = 0; i < GetParam(); ++i) {
    SimDevice device;
    device.name = "sim:" + std::to_string(i);
    device.speed = i % 2 == 0 ? 1.0 : 0.5;
    options.devices.push_back(device);
    devices.devices.push_back({device.name, "sim", {}});
  }
  options.noise = 0.02;
  options.seed = 1;
  options.throttles = {{0, 2.0, 200, kSteps}};
  Box box(options);
  balance::Balancer balancer(devices);
  const std::int64_t batch = 64 * static_cast<std::int64_t>(GetParam());
  double ideal = 0.0;
  double used = 0.0;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const balance::StepPlan plan = balancer.next_plan(batch);
    if (step >= kSettled) {
      ideal += box.ideal(step, batch);
      used += box.makespan(step, plan.shares);
    }
    balancer.record(box.run(step, plan.shares).timings);
  }
  EXPECT_LE(used / ideal - 1.0, 0.01);
}

INSTANTIATE_TEST_SUITE_P(Devices, Scale, testing::Values(2, 4, 8, 16, 32, 64, 128, 256));

}  // namespace
}  // namespace paceline::sim

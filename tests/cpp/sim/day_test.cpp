// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <tuple>

#include <paceline/error.hpp>
#include <paceline/sim/day.hpp>

namespace paceline::sim {
namespace {

// A third of the day with a third of its bursts, so that the night is as short, and the rates change as much faster.
DayOptions third(std::uint64_t seed) {
  DayOptions options;
  options.hours = 8.0;
  options.bursts = 8;
  options.seed = seed;
  return options;
}

TEST(SimulatedDay, MeetsTheTargetWithHardlyMoreDeviceHoursThanHindsight) {
  for (const auto& [seed, activation, percent] : {std::tuple{1, 5.0, 99}, {2, 5.0, 99}, {1, 30.0, 98}, {2, 30.0, 98}}) {
    DayOptions options = third(static_cast<std::uint64_t>(seed));
    options.activation_seconds = activation;
    const DayResult result = simulate_day(options);
    EXPECT_EQ(result.minutes, 480);
    EXPECT_GE(result.met, result.minutes * percent / 100) << seed << ", " << activation;
    EXPECT_LE(result.device_hours, 1.1 * result.best_device_hours) << seed;
    EXPECT_LT(result.best_device_hours, 0.5 * result.all_device_hours) << seed;
    EXPECT_GT(result.best_device_hours, 0.0);
  }
}

TEST(SimulatedDay, AlwaysAllDevicesMeetTheTargetAndAreDearer) {
  DayOptions options = third(1);
  options.scale.wait_seconds = 1e-9;  // so every device is needed
  const DayResult result = simulate_day(options);
  EXPECT_NEAR(result.device_hours, result.all_device_hours, 0.01 * result.all_device_hours);
  EXPECT_EQ(result.activations, 0);
}

TEST(SimulatedDay, SaysInHowManyMinutesAllDevicesTogetherMeetTheTarget) {
  DayOptions options = third(1);
  options.hours = 1.0;
  options.bursts = 0;
  options.scale.wait_seconds = 1e-9;  // so every device is needed
  options.low = options.high = 0.7;
  const DayResult needed = simulate_day(options);
  EXPECT_EQ(needed.all_met, needed.met);
  EXPECT_LT(needed.all_met, needed.minutes / 2);
  options.scale.wait_seconds = 0.1;
  options.low = options.high = 0.3;
  options.bursts = 4;
  options.activation_seconds = 120.0;  // longer than a burst takes to come
  const DayResult result = simulate_day(options);
  EXPECT_LT(result.device_hours, 0.99 * result.all_device_hours);
  EXPECT_GT(result.all_met, result.met);
  EXPECT_GT(result.all_met, needed.all_met);
}

TEST(SimulatedDay, WithoutJobsKeepsOneDevice) {
  DayOptions options = third(1);
  options.hours = 0.5;
  options.low = 0.0;
  options.high = 1e-9;
  options.bursts = 0;
  const DayResult result = simulate_day(options);
  EXPECT_EQ(result.met, 30);
  EXPECT_EQ(result.mean_wait_seconds, 0.0);
  EXPECT_EQ(result.best_device_hours, 0.0);
}

TEST(SimulatedDay, RefusesWhatIsNoDay) {
  const auto refused = [](auto change) {
    DayOptions options;
    change(options);
    EXPECT_THROW((void)simulate_day(options), InvalidArgument);
  };
  refused([](DayOptions& one) { one.speeds.clear(); });
  refused([](DayOptions& one) { one.hours = 0.0; });
  refused([](DayOptions& one) { one.job_seconds = 0.0; });
  refused([](DayOptions& one) { one.job_seconds = 1e-5; });
  refused([](DayOptions& one) { one.high = 0.05; });
  refused([](DayOptions& one) { one.burst = -1.0; });
  refused([](DayOptions& one) { one.ramp_seconds = 0.0; });
  refused([](DayOptions& one) { one.bursts = -1; });
  refused([](DayOptions& one) { one.speeds = {1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9}; });
}

}  // namespace
}  // namespace paceline::sim

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
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

// An hour of jobs of 1 s with deadlines of 3 s to 9 s, in bursts that come within a second. The wait that is aimed at
// is so long that it wants one device.
DayOptions timed(std::uint64_t seed) {
  DayOptions options;
  options.speeds.assign(8, 1.0);
  options.hours = 1.0;
  options.low = options.high = 0.05;
  options.bursts = 20;
  options.burst = 0.6;
  options.burst_seconds = 20.0;
  options.ramp_seconds = 1.0;
  options.job_seconds = 1.0;
  options.variation = 0.0;
  options.activation_seconds = 1.0;
  options.scale.wait_seconds = 1000.0;
  options.deadline_seconds = 6.0;
  options.seed = seed;
  return options;
}

TEST(SimulatedDay, BringsReleasedDevicesInTimeForDeadlines) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    const DayResult result = simulate_day(timed(seed));
    EXPECT_EQ(result.in_time, 1.0) << "seed " << seed;
    EXPECT_LT(result.device_hours, 0.25 * result.all_device_hours);
    DayOptions slow = timed(seed);
    slow.activation_seconds = 20.0;  // so none is back in time
    const DayResult refused = simulate_day(slow);
    EXPECT_GT(refused.rejected, 0.2) << "seed " << seed;
    EXPECT_LT(refused.in_time, 0.8) << "seed " << seed;
    EXPECT_EQ(refused.all_in_time, 1.0) << "seed " << seed;
  }
}

TEST(SimulatedDay, EndsNoJobLateWithoutNoiseAndCountsEachOnce) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    DayOptions options = timed(seed);
    options.speeds = {1.0, 1.0, 0.5, 0.25};
    options.deadline_seconds = 1.5 + 0.5 * static_cast<double>(seed % 4);
    options.activation_seconds = static_cast<double>(seed % 3);
    options.scale.wait_seconds = seed % 2 == 0 ? 1.0 : 1000.0;
    const DayResult result = simulate_day(options);
    EXPECT_EQ(result.late, 0.0) << "seed " << seed;
    EXPECT_NEAR(result.in_time + result.rejected + result.expired, 1.0, 1e-9) << "seed " << seed;
    EXPECT_GT(result.rejected + result.expired, 0.0) << "seed " << seed;
    options.variation = 1.0;
    const DayResult noisy = simulate_day(options);
    EXPECT_GT(noisy.late, 0.0) << "seed " << seed;
    EXPECT_NEAR(noisy.in_time + noisy.late + noisy.rejected + noisy.expired, 1.0, 1e-9) << "seed " << seed;
  }
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
  refused([](DayOptions& one) { one.deadline_seconds = 0.0; });
  refused([](DayOptions& one) { one.speeds = {1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9}; });
}

}  // namespace
}  // namespace paceline::sim

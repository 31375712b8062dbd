// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <future>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/engine/step_loop.hpp>

#include "engine/loop/health_log.hpp"
#include "host_group.hpp"

namespace paceline::internal {
namespace {

using std::chrono::seconds;

balance::DeviceReport device(double speed, double error = 0.001, double slowdown = 0.0) {
  balance::DeviceReport report;
  report.measured = true;
  report.speed = speed;
  report.error = error;
  report.change_points = slowdown > 0.0 ? 1 : 0;
  report.slowdown = slowdown;
  return report;
}

/// Devices whose power cap holds for half of the time; counts how often all of them were sampled.
struct CappedDevices {
  int samples = 0;
  seconds now{100};

  [[nodiscard]] HealthLog log(std::size_t count) {
    return HealthLog(std::vector<Device>(count), [this](std::span<const Device> devices) {
      ++samples;
      DeviceHealth health;
      health.when = std::chrono::steady_clock::time_point(now);
      health.limited_for[static_cast<std::size_t>(ClockLimit::power_cap)] = now / 2;
      return HealthLog::Samples(devices.size(), health);
    });
  }
};

TEST(HealthLog, AsksOnlyAboutDevicesThatAreSlowerThanTheirClassOrThanBefore) {
  EXPECT_FALSE(needs_causes(device(1.0)));
  EXPECT_FALSE(needs_causes(device(0.99)));
  EXPECT_TRUE(needs_causes(device(0.8)));
  EXPECT_FALSE(needs_causes(device(0.8, 0.15))) << "not told from noise";
  EXPECT_TRUE(needs_causes(device(1.0, 0.001, 1.5)));
  EXPECT_FALSE(needs_causes(device(1.0, 0.001, 0.7))) << "faster than before";
  balance::DeviceReport gone = device(0.5);
  gone.retired = true;
  EXPECT_FALSE(needs_causes(gone));
  EXPECT_FALSE(needs_causes(balance::DeviceReport{}));
}

TEST(HealthLog, DoesNotWaitForTheFirstSampleOfGpus) {
  std::promise<void> answer;
  std::atomic<bool> answered = false;
  Device gpu;
  gpu.kind = DeviceKind::cuda;
  int samples = 0;
  HealthLog log({gpu}, [&](std::span<const Device>) {
    DeviceHealth health;
    if (samples++ == 0) {
      answered = answer.get_future().wait_for(seconds(20)) == std::future_status::ready;
    } else {
      health.when += seconds(10);
      health.limited_for[static_cast<std::size_t>(ClockLimit::power_cap)] = seconds(5);
    }
    return HealthLog::Samples(1, health);
  });
  EXPECT_FALSE(answered);
  answer.set_value();
  balance::BalanceReport report;
  report.steps = 1;
  report.devices = {device(0.5)};
  EXPECT_EQ(log.causes(report).size(), 1u);
  EXPECT_TRUE(answered) << "the causes are told from the first sample on";
  EXPECT_EQ(samples, 2);
}

TEST(HealthLog, TakesNoSampleWhereAllIsWell) {
  CappedDevices capped;
  HealthLog log = capped.log(2);
  balance::BalanceReport report;
  report.steps = 5;
  report.devices = {device(1.0), device(1.0)};
  EXPECT_EQ(log.causes(report), std::vector<std::string>(2));
  EXPECT_EQ(capped.samples, 1) << "of all devices at once, when it was made";
}

TEST(HealthLog, LooksBackToTheLastTimeItWasAskedAndIgnoresIdleTime) {
  CappedDevices capped;
  HealthLog log = capped.log(1);
  balance::BalanceReport report;
  report.devices = {device(0.7)};
  const auto window = [&](int now, std::int64_t steps) {
    capped.now = seconds(now);
    report.steps = steps;
    const std::string text = log.causes(report).front();
    return text.substr(text.find("of the last"));
  };
  EXPECT_EQ(window(130, 5), "of the last 30 s)");
  EXPECT_EQ(window(190, 5), "of the last 30 s)");
  EXPECT_EQ(window(150, 6), "of the last 20 s)");
}

TEST(HealthLog, LivesWithDevicesThatDoNotTell) {
  HealthLog log(std::vector<Device>(1),
                [](std::span<const Device> devices) { return HealthLog::Samples(devices.size()); });
  balance::BalanceReport report;
  report.steps = 1;
  report.devices = {device(0.5)};
  EXPECT_EQ(log.causes(report), std::vector<std::string>(1));
}

TEST(HealthLog, AsksAgainIfTheFirstSampleFailed) {
  int calls = 0;
  const auto sample = [&](std::span<const Device> devices) {
    if (++calls == 1) throw std::runtime_error("no memory");
    return HealthLog::Samples(devices.size());
  };
  std::vector<Device> gpu(1);
  gpu[0].kind = DeviceKind::cuda;
  HealthLog log(gpu, sample);
  balance::BalanceReport report;
  report.steps = 1;
  report.devices = {device(0.5)};
  EXPECT_THROW(log.causes(report), std::runtime_error);
  EXPECT_EQ(log.causes(report), std::vector<std::string>(1));
}

}  // namespace
}  // namespace paceline::internal

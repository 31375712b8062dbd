// SPDX-License-Identifier: Apache-2.0
#include "runtime/start_timeout.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include <paceline/runtime/device.hpp>

namespace paceline {
namespace {

Device device_of(DeviceKind kind, const std::string& name) {
  Device device;
  device.kind = kind;
  device.name = device.memory_space = name;
  device.cores = {3};
  return device;
}

TEST(StartTimeout, AllowsForTheContextsOfGpus) {
  const std::vector<Device> host{device_of(DeviceKind::host, "host:0")};
  std::vector<Device> mixed = host;
  mixed.push_back(device_of(DeviceKind::cuda, "cuda:7"));
  EXPECT_EQ(internal::start_timeout(host), std::chrono::seconds(10));
  EXPECT_EQ(internal::start_timeout(mixed), std::chrono::seconds(120));
}

TEST(StartTimeout, SaysWhatTheWorkerWaitedFor) {
  const std::string host = internal::late_start(device_of(DeviceKind::host, "host:0"), std::chrono::seconds(10));
  EXPECT_EQ(host,
            "DeviceGroup: the worker of host:0 did not start within 10 s. Is another process holding its core 3 at a "
            "real-time priority?");
  const std::string gpu = internal::late_start(device_of(DeviceKind::cuda, "cuda:7"), std::chrono::seconds(120));
  EXPECT_NE(gpu.find("cuda:7 did not start within 120 s. It waits for the driver to make a context"), gpu.npos) << gpu;
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// What tests of GPUs share.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <paceline/runtime/device_group.hpp>

#include "errors.hpp"
#include "fake_cuda.hpp"

namespace paceline {

/// "cuda:0/1" stands for a second queue of cuda:0: a part of the GPU that shares its memory.
inline DeviceGroup group_of(const std::vector<std::string>& names) {
  std::vector<Device> devices;
  for (const std::string& name : names) {
    devices.push_back(find_device(name.substr(0, name.find('/'))));
    devices.back().name = name;
  }
  return DeviceGroup(devices);
}

/// Nothing went wrong that the fake has noticed, and everything was given back.
inline void expect_clean(std::uint64_t seed = 0) {
  ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(fake::driver_staged_copies(), 0) << "seed " << seed;
  ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
}

/// Calls `body` for each seed, which decides what runs first of what may run in any order. Nothing may be left of it.
template <class Body>
void for_each_order(std::uint64_t count, const Body& body) {
  for (std::uint64_t seed = 0; seed < count && !::testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    body(seed);
    expect_clean(seed);
  }
}

/// Whether this process has a thread of that name.
inline bool has_thread(const std::string& wanted) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    if (name == wanted) return true;
  }
  return false;
}

/// Returns when a thread that was left to itself has ended.
inline void await_the_thread(const std::string& name = "pl nccl") {
  while (has_thread(name)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// What tests of GPUs share: errors and groups.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

template <class E>
E thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return E("nothing");
}

inline bool says(const Error& error, const std::string& words) {
  return std::string(error.what()).find(words) != std::string::npos;
}

/// "cuda:0/1" stands for a second queue of cuda:0: a part of the GPU that shares its memory.
inline DeviceGroup group_of(const std::vector<std::string>& names) {
  std::vector<Device> devices;
  for (const std::string& name : names) {
    devices.push_back(find_device(name.substr(0, name.find('/'))));
    devices.back().name = name;
  }
  return DeviceGroup(devices);
}

/// Returns when a thread that was left to itself has ended.
inline void await_the_thread() {
  const auto is_there = [] {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
      if (name == "pl nccl") return true;
    }
    return false;
  };
  while (is_there()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace paceline

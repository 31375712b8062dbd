// SPDX-License-Identifier: Apache-2.0
//
// What tests of GPUs share: errors and groups.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
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

}  // namespace paceline

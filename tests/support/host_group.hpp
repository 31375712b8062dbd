// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <paceline/runtime/device_group.hpp>

namespace paceline {

/// A group of `count` host devices. Devices beyond the machine's cores share cores.
inline DeviceGroup host_group(std::size_t count) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.push_back("host:" + std::to_string(i));
  return DeviceGroup(names);
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>

namespace paceline {

enum class DeviceKind : std::uint8_t { host, cuda };

/// A logical place of execution: `host:1` (a pinned CPU worker); later `cuda:0`, `cuda:0/1`.
///
/// A value: it names the place and says what was found out about it. It owns nothing.
struct PACELINE_API Device {
  DeviceKind kind = DeviceKind::host;
  std::int32_t index = 0;
  std::string name;          ///< "host:1"
  std::string memory_space;  ///< devices with equal spaces share memory without copying: "host"
  std::string device_class;  ///< devices of one class are taken as equally fast until measured: "host"
  std::vector<int> cores;    ///< host: the cores its worker is pinned to, empty when pinning is impossible
  int numa_node = -1;        ///< -1 when the system does not tell
  friend bool operator==(const Device&, const Device&) = default;
};

/// Every device that this process can use now, in order. Empty only where the platform has no CPU to offer.
///
/// Host devices are one per core of the process's affinity mask, no more than its cgroup's CPU limit allows; see
/// host_device() for which cores they are pinned to.
PACELINE_API std::vector<Device> devices();

/// The device called `name`. host:i wraps nothing: asking for more host devices than cores is legal, they then
/// share cores (i modulo the usable cores).
/// @throws InvalidArgument if the name is malformed or the device does not exist, listing those that do.
PACELINE_API Device find_device(std::string_view name);

}  // namespace paceline

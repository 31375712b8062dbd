// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>

namespace paceline {

enum class DeviceKind : std::uint8_t { host, cuda };

/// A logical place of execution: `host:1` (a pinned CPU worker), `cuda:0` (a GPU), or `cuda:0/1` (a part of its SMs,
/// see partition()).
///
/// A plain value: the name and the properties of the place. It owns nothing.
struct PACELINE_API Device {
  DeviceKind kind = DeviceKind::host;
  std::int32_t index = 0;
  std::int32_t part = -1;    ///< the 1 of cuda:0/1; -1 for a whole device
  std::string name;          ///< "host:1"
  std::string memory_space;  ///< devices with equal spaces share memory without copying: "host"
  std::string device_class;  ///< devices of one class count as equally fast until measured: "host"
  std::vector<int> cores;    ///< host: the cores its worker is pinned to; empty if pinning is impossible
  int numa_node = -1;        ///< -1 if the system does not tell
  int sm_count = 0;          ///< GPUs: the number of its streaming multiprocessors
  double fraction = 1.0;     ///< the fraction of the GPU that partition() was asked for
  friend bool operator==(const Device&, const Device&) = default;
};

/// Every device that this process can use now, in order. Empty only if the platform offers no CPU.
///
/// GPUs come first. Parts of GPUs are not listed, because using a GPU and its part would use the part twice;
/// find_device() finds them. There is one host device per core of the process's affinity mask, limited by its cgroup's
/// CPU quota. host_device() says which cores they are pinned to.
PACELINE_API std::vector<Device> devices();

/// The device called `name`. More host devices than cores are allowed: host:i then shares the cores of i modulo the
/// number of usable cores.
/// @throws InvalidArgument if the name is malformed or the device does not exist. The message lists the devices that
/// do.
PACELINE_API Device find_device(std::string_view name);

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>

namespace paceline {

enum class DeviceKind : std::uint8_t { host, cuda };

/// A logical place of execution: `host:1` (a pinned CPU worker), `cuda:0` (a GPU), `cuda:0/1` (a part of its SMs, see
/// partition()).
///
/// A value: it names the place and says what was found out about it. It owns nothing.
struct PACELINE_API Device {
  DeviceKind kind = DeviceKind::host;
  std::int32_t index = 0;
  std::int32_t part = -1;    ///< of cuda:0/1 the 1; -1: a whole device
  std::string name;          ///< "host:1"
  std::string memory_space;  ///< devices with equal spaces share memory without copying: "host"
  std::string device_class;  ///< devices of one class are taken as equally fast until measured: "host"
  std::vector<int> cores;    ///< host: the cores its worker is pinned to, empty when pinning is impossible
  int numa_node = -1;        ///< -1 when the system does not tell
  int sm_count = 0;          ///< GPUs: the streaming multiprocessors that it computes on
  double fraction = 1.0;     ///< of the GPU, as partition() was asked for it
  friend bool operator==(const Device&, const Device&) = default;
};

/// Every device that this process can use now, in order. Empty only where the platform has no CPU to offer.
///
/// GPUs come first, whole: their parts are found by name, since to use both would be to use the GPU twice.
/// Host devices are one per core of the process's affinity mask, no more than its cgroup's CPU limit allows; see
/// host_device() for which cores they are pinned to.
PACELINE_API std::vector<Device> devices();

/// The device called `name`. host:i wraps nothing: asking for more host devices than cores is legal, they then
/// share cores (i modulo the usable cores).
/// @throws InvalidArgument if the name is malformed or the device does not exist, listing those that do.
PACELINE_API Device find_device(std::string_view name);

}  // namespace paceline

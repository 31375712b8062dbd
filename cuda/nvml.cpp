// SPDX-License-Identifier: Apache-2.0
#include "nvml.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <mutex>
#include <vector>

namespace paceline::cuda {
namespace {

using std::chrono::nanoseconds;

template <class Function, class... Arguments>
std::optional<std::uint32_t> ask(Function function, NvmlDevice device, Arguments... arguments) {
  std::uint32_t value = 0;
  if (function == nullptr || function(device, arguments..., &value) != kNvmlSuccess) return std::nullopt;
  return value;
}

std::optional<double> scaled(std::optional<std::uint32_t> value, double unit) {
  if (!value) return std::nullopt;
  return unit * static_cast<double>(*value);
}

// NVML's bits in the order of ClockLimit, which is the order of its bits from 0x1 to 0x100.
std::optional<std::bitset<kClockLimitCount>> read_limits(const NvmlFunctions& nvml, NvmlDevice device) {
  unsigned long long bits = 0;
  if (nvml.clock_limits == nullptr || nvml.clock_limits(device, &bits) != kNvmlSuccess) return std::nullopt;
  return std::bitset<kClockLimitCount>(bits);
}
static_assert(static_cast<int>(ClockLimit::idle) == 0 && static_cast<int>(ClockLimit::power_cap) == 2 &&
              static_cast<int>(ClockLimit::software_thermal) == 5 &&
              static_cast<int>(ClockLimit::display_setting) == 8);

void read_limit_times(const NvmlLibrary& library, NvmlDevice device, DeviceHealth& health) {
  const NvmlFunctions& nvml = library.functions();
  if (nvml.field_values == nullptr) return;
  const auto thermal = thermal_fields(library.driver_version());
  constexpr std::uint32_t power_cap = 74;
  constexpr std::uint32_t sync_boost = 76;
  const std::pair<std::uint32_t, ClockLimit> wanted[] = {{power_cap, ClockLimit::power_cap},
                                                         {sync_boost, ClockLimit::sync_boost},
                                                         {thermal[0], ClockLimit::software_thermal},
                                                         {thermal[1], ClockLimit::hardware_thermal},
                                                         {thermal[2], ClockLimit::power_brake}};
  std::vector<NvmlFieldValue> values;
  std::vector<ClockLimit> limits;
  for (const auto& [field, limit] : wanted) {
    if (field == 0) continue;
    values.push_back({});
    values.back().field = field;
    values.back().status = kNvmlNotSupported;  // should the library leave an entry alone
    limits.push_back(limit);
  }
  if (nvml.field_values(device, static_cast<int>(values.size()), values.data()) != kNvmlSuccess) return;
  for (std::size_t i = 0; i < values.size(); ++i) {
    // A number that means another field to this driver after all is mostly told by its type.
    if (values[i].status != kNvmlSuccess || values[i].type != kNvmlUnsignedLongLong) continue;
    if (values[i].value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) continue;
    health.limited_for[static_cast<std::size_t>(limits[i])] = nanoseconds(static_cast<std::int64_t>(values[i].value));
  }
}

/// Appends one list of processes; false if it could not be had.
template <class Entry>
bool append_processes(NvmlStatus (*function)(NvmlDevice, std::uint32_t*, Entry*), NvmlDevice device,
                      std::vector<NvmlProcess>& processes) {
  if (function == nullptr) return false;
  std::vector<Entry> entries(32);
  for (int attempt = 0; attempt < 4; ++attempt) {
    auto count = static_cast<std::uint32_t>(entries.size());
    const NvmlStatus status = function(device, &count, entries.data());
    if (status == kNvmlInsufficientSize) {
      entries.resize(std::max<std::size_t>(count, entries.size()) + 32);  // processes come while we ask
      continue;
    }
    if (status != kNvmlSuccess || count > entries.size()) return false;
    for (std::uint32_t i = 0; i < count; ++i) processes.push_back({entries[i].pid, entries[i].used_memory, 0, 0});
    return true;
  }
  return false;
}

/// Whether this process sees the system's own process numbers, and not those of a container.
bool in_first_pid_namespace() {
  constexpr ino_t first = 0xEFFFFFFC;  // of the kernel, since 3.8
  struct stat entry{};
  return stat("/proc/self/ns/pid", &entry) == 0 && entry.st_ino == first;
}

std::optional<OtherProcesses> read_processes(const NvmlFunctions& nvml, NvmlDevice device) {
  std::vector<NvmlProcess> processes;
  const bool compute = nvml.compute_processes != nullptr
                           ? append_processes(nvml.compute_processes, device, processes)
                           : append_processes(nvml.compute_processes_v1, device, processes);
  if (!compute) return std::nullopt;
  // A desktop that is drawn by this GPU; many GPUs for servers have no such list.
  if (nvml.graphics_processes != nullptr) {
    append_processes(nvml.graphics_processes, device, processes);
  } else {
    append_processes(nvml.graphics_processes_v1, device, processes);
  }
  return others_among(processes, static_cast<std::uint32_t>(getpid()), in_first_pid_namespace());
}

std::optional<std::int64_t> count_nvlinks(const NvmlFunctions& nvml, NvmlDevice device) {
  if (nvml.nvlink_state == nullptr) return std::nullopt;
  constexpr std::uint32_t more_than_any_gpu_has = 64;
  std::optional<std::int64_t> up;
  for (std::uint32_t link = 0; link < more_than_any_gpu_has; ++link) {
    std::uint32_t active = 0;
    const NvmlStatus status = nvml.nvlink_state(device, link, &active);
    if (status == kNvmlInvalidArgument) break;  // behind the last one
    if (status == kNvmlSuccess) up = up.value_or(0) + (active == 1 ? 1 : 0);
  }
  return up;
}

std::optional<bool> peer_can(const NvmlFunctions& nvml, NvmlDevice from, NvmlDevice to, NvmlPeerCapability what) {
  NvmlPeerStatus status = kNvmlPeerUnknown;
  if (nvml.peer_status == nullptr || nvml.peer_status(from, to, what, &status) != kNvmlSuccess) return std::nullopt;
  if (status == kNvmlPeerUnknown) return std::nullopt;
  return status == kNvmlPeerOk;
}

/// "580.65.06" -> 580, 65
std::optional<std::pair<int, int>> parse_driver(std::string_view version) noexcept {
  int branch = 0;
  int minor = 0;
  const char* const end = version.data() + version.size();
  const auto first = std::from_chars(version.data(), end, branch);
  if (first.ec != std::errc{} || first.ptr == end || *first.ptr != '.') return std::nullopt;
  if (std::from_chars(first.ptr + 1, end, minor).ec != std::errc{}) return std::nullopt;
  return std::pair{branch, minor};
}

}  // namespace

// NVML 575 gave these fields numbers that 570 had used for others, and 580 took that back on its way, after 580.65:
// nvidia-ml-py of each version says so. Field 75 is older than all of them and counts every slowdown by heat.
std::array<std::uint32_t, 3> thermal_fields(std::string_view driver_version) noexcept {
  constexpr std::uint32_t any_heat = 75;
  const auto version = parse_driver(driver_version);
  if (!version) return {0, 0, 0};
  if (*version < std::pair{575, 0}) return {any_heat, 0, 0};
  if (*version <= std::pair{580, 65}) return {251, 252, 253};
  if (*version < std::pair{580, 82}) return {any_heat, 0, 0};
  return {269, 270, 271};
}

OtherProcesses others_among(std::span<const NvmlProcess> processes, std::uint32_t own_pid, bool numbers_are_ours) {
  std::vector<NvmlProcess> distinct;  // one that draws and computes is in both lists
  bool found = false;
  for (const NvmlProcess& process : processes) {
    found = found || process.pid == own_pid;
    const auto same = [&](const NvmlProcess& other) { return other.pid == process.pid; };
    if (process.pid != own_pid && std::none_of(distinct.begin(), distinct.end(), same)) distinct.push_back(process);
  }
  OtherProcesses others;
  others.count = static_cast<std::int64_t>(distinct.size());
  if (!numbers_are_ours && !found && !distinct.empty())
    return {.count = others.count - 1, .memory_bytes = std::nullopt};
  std::uint64_t memory = 0;
  for (const NvmlProcess& process : distinct) {
    if (process.used_memory == std::numeric_limits<std::uint64_t>::max()) return others;
    memory += process.used_memory;
  }
  others.memory_bytes = memory;
  return others;
}

std::optional<DeviceHealth> read_nvml(const NvmlLibrary& library, const GpuAddress& gpu,
                                      std::span<const GpuAddress> others) {
  if (!library.available()) return std::nullopt;
  const NvmlFunctions& nvml = library.functions();
  const std::lock_guard lock(library.mutex());
  NvmlDevice device = nullptr;
  if (nvml.device_by_pci_bus_id(gpu.pci_bus_id.c_str(), &device) != kNvmlSuccess) return std::nullopt;
  DeviceHealth health;
  health.when = std::chrono::steady_clock::now();
  health.clock_hz = scaled(ask(nvml.clock, device, kNvmlClockSm), 1e6);
  health.max_clock_hz = scaled(ask(nvml.max_clock, device, kNvmlClockSm), 1e6);
  health.limits = read_limits(nvml, device);
  read_limit_times(library, device, health);
  health.temperature_celsius = scaled(ask(nvml.temperature, device, kNvmlTemperatureGpu), 1.0);
  health.power_watts = scaled(ask(nvml.power, device), 1e-3);
  health.power_limit_watts = scaled(ask(nvml.power_limit, device), 1e-3);
  health.other_processes = read_processes(nvml, device);
  health.nvlinks_up = count_nvlinks(nvml, device);
  for (const GpuAddress& other : others) {
    NvmlDevice peer = nullptr;
    if (nvml.device_by_pci_bus_id(other.pci_bus_id.c_str(), &peer) != kNvmlSuccess) continue;
    health.peers.push_back({.device = other.name,
                            .reads = peer_can(nvml, device, peer, kNvmlPeerRead),
                            .writes = peer_can(nvml, device, peer, kNvmlPeerWrite),
                            .over_nvlink = peer_can(nvml, device, peer, kNvmlPeerNvlink)});
  }
  return health;
}

}  // namespace paceline::cuda

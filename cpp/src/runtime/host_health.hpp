// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/device_health.hpp>

namespace paceline {

/// CPU time in the kernel's ticks.
struct CoreTicks {
  std::int64_t busy = 0;
  std::int64_t stolen = 0;
  friend bool operator==(const CoreTicks&, const CoreTicks&) = default;
};

/// The cores of /proc/stat by number. Lines that make no sense are left out.
[[nodiscard]] PACELINE_API std::map<int, CoreTicks> parse_core_ticks(std::string_view proc_stat);

/// User and system time of a process or thread, in ticks, from its `stat` file.
[[nodiscard]] PACELINE_API std::optional<std::int64_t> parse_task_ticks(std::string_view stat);

/// nr_periods and nr_throttled of a cgroup's cpu.stat, which both versions of cgroups have.
[[nodiscard]] PACELINE_API std::optional<QuotaPeriods> parse_quota_periods(std::string_view cpu_stat);

/// What the /proc and /sys below `root` say about these cores, this process and its cgroup.
[[nodiscard]] PACELINE_API DeviceHealth read_host_health(const std::filesystem::path& root,
                                                         const std::vector<int>& cores,
                                                         std::int64_t ticks_per_second = 100);

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include <paceline/runtime/device_health.hpp>

namespace paceline::internal {

/// CPU time of a core in kernel ticks.
struct CoreTicks {
  std::int64_t busy = 0;
  std::int64_t stolen = 0;
  friend bool operator==(const CoreTicks&, const CoreTicks&) = default;
};

/// The cores in /proc/stat, by number. Skips malformed lines.
[[nodiscard]] std::map<int, CoreTicks> parse_core_ticks(std::string_view proc_stat);

/// User plus system time of a process or thread, in ticks, from its `stat` file.
[[nodiscard]] std::optional<std::int64_t> parse_task_ticks(std::string_view stat);

/// nr_periods and nr_throttled from a cgroup's cpu.stat (v1 and v2).
[[nodiscard]] std::optional<QuotaPeriods> parse_quota_periods(std::string_view cpu_stat);

/// What the /proc and /sys below `root` say about this process, its cgroup and the machine's cores at one moment.
/// Construction reads two files per thread, so one object serves all devices.
class HostCounters {
 public:
  explicit HostCounters(const std::filesystem::path& root, std::int64_t ticks_per_second = 100);
  [[nodiscard]] DeviceHealth health_of(const std::vector<int>& cores) const;

 private:
  struct Thread {
    std::vector<int> allowed;  // cores, ascending
    std::int64_t ticks = 0;
  };
  [[nodiscard]] std::int64_t own_ticks(const std::vector<int>& cores) const;
  [[nodiscard]] std::optional<CoreTimes> times_of(const std::vector<int>& cores) const;

  std::filesystem::path root_;
  std::chrono::steady_clock::time_point when_;
  std::int64_t ticks_per_second_;
  std::map<int, CoreTicks> cores_;
  std::optional<std::int64_t> own_ticks_;  // of the whole process
  std::vector<Thread> threads_;
  std::optional<QuotaPeriods> quota_;
};

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline {

/// A CPU quota: `quota_us` microseconds of CPU time in every `period_us`, both above zero.
struct CpuLimit {
  std::int64_t quota_us = 0;
  std::int64_t period_us = 0;
  std::string source;  ///< the file that says so

  /// The quota in cores: 1.5 for 150 ms in every 100 ms.
  [[nodiscard]] double cores() const noexcept { return static_cast<double>(quota_us) / static_cast<double>(period_us); }
  /// The most workers the quota can feed: cores() rounded up, at least 1.
  [[nodiscard]] std::int64_t worker_count() const noexcept {
    return quota_us / period_us + (quota_us % period_us != 0 ? 1 : 0);
  }
  friend bool operator==(const CpuLimit&, const CpuLimit&) = default;
};

/// One logical CPU as the kernel numbers it.
struct HostCore {
  int index = 0;
  int numa_node = -1;     ///< -1 when the system does not tell
  int physical_core = 0;  ///< lowest index among the hyperthreads of its physical core
  int sibling_rank = 0;   ///< 0 for the first hyperthread of its physical core that we may use, 1 for the second
  friend bool operator==(const HostCore&, const HostCore&) = default;
};

/// What this process may use of the machine's CPUs.
struct HostTopology {
  std::vector<HostCore> cores;        ///< the affinity mask, ascending; empty where the platform has no such mask
  std::optional<CpuLimit> cpu_limit;  ///< the tightest cgroup quota in force
  std::int64_t device_count = 1;      ///< how many host devices this makes
};

/// The topology of this process, now.
///
/// The mask is the main thread's: a pinned worker that asks gets the same answer as everybody. Reads a handful of
/// small files, in the order of 0.1 ms; nothing is cached, because quota and mask may change while we run.
[[nodiscard]] PACELINE_API HostTopology read_host_topology();

/// The same from the /proc and /sys below `root` and the given cores. A file that is missing or makes no sense sets no
/// limit.
[[nodiscard]] PACELINE_API HostTopology read_host_topology(const std::filesystem::path& root,
                                                           std::vector<int> affinity);

/// The tightest CPU quota on this process's cgroups: v2 (cpu.max), v1 (cpu.cfs_quota_us), or both on a hybrid
/// system, each from its own group up to the root of what is mounted.
[[nodiscard]] PACELINE_API std::optional<CpuLimit> read_cpu_limit(const std::filesystem::path& root = "/");

/// The cores of the main thread's affinity mask, ascending. Empty when the system does not tell.
[[nodiscard]] PACELINE_API std::vector<int> affinity_mask();

/// "0-3,8" -> 0 1 2 3 8, ascending and unique; nothing at all if any part is malformed.
[[nodiscard]] PACELINE_API std::optional<std::vector<int>> parse_cpu_list(std::string_view text);

/// The device host:`index`; indices from `device_count` on share the cores of index modulo device_count.
///
/// With a core for every device each has one, first hyperthreads first, so that a group of few devices does not
/// share a physical core. Where a quota allows fewer devices than there are cores, the cores are dealt out in
/// neighbouring runs instead of leaving some unused: two quota-limited jobs on one box would otherwise both pin
/// themselves to its first cores.
[[nodiscard]] PACELINE_API Device host_device(const HostTopology& topology, std::int32_t index);

}  // namespace paceline

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

/// A CPU quota: `quota_us` microseconds of CPU time in every `period_us`. Both are positive.
struct CpuLimit {
  std::int64_t quota_us = 0;
  std::int64_t period_us = 0;
  std::string source;  ///< the file that sets it

  /// The quota in cores: 1.5 for 150 ms in every 100 ms.
  [[nodiscard]] double cores() const noexcept { return static_cast<double>(quota_us) / static_cast<double>(period_us); }
  /// The most workers that the quota can keep busy: cores() rounded up, at least 1.
  [[nodiscard]] std::int64_t worker_count() const noexcept {
    return quota_us / period_us + (quota_us % period_us != 0 ? 1 : 0);
  }
  friend bool operator==(const CpuLimit&, const CpuLimit&) = default;
};

/// One logical CPU as the kernel numbers it.
struct HostCore {
  int index = 0;
  int numa_node = -1;     ///< -1 if the system does not tell
  int physical_core = 0;  ///< the lowest index among the hyperthreads of its physical core
  int sibling_rank = 0;   ///< 0 for the first usable hyperthread of its physical core, 1 for the second
  int socket = -1;        ///< the processor package; -1 if the system does not tell
  friend bool operator==(const HostCore&, const HostCore&) = default;
};

/// The CPUs that this process may use.
struct HostTopology {
  std::vector<HostCore> cores;        ///< the affinity mask, ascending; empty if the platform has none
  std::optional<CpuLimit> cpu_limit;  ///< the tightest cgroup quota
  std::int64_t device_count = 1;      ///< the number of host devices
};

/// The topology of this process, now.
///
/// It uses the main thread's mask, so a pinned worker gets the same answer as every other thread. Each call reads a few
/// small files, in about 0.1 ms. The result is not cached, because quota and mask may change.
[[nodiscard]] PACELINE_API HostTopology read_host_topology();

/// Like above, from the given cores and the /proc and /sys below `root`. A missing or malformed file sets no limit.
[[nodiscard]] PACELINE_API HostTopology read_host_topology(const std::filesystem::path& root,
                                                           std::vector<int> affinity);

/// The tightest CPU quota on this process's cgroups: v2 (cpu.max), v1 (cpu.cfs_quota_us), or both on a hybrid system.
/// Each is searched from the process's own group up to the mounted root.
[[nodiscard]] PACELINE_API std::optional<CpuLimit> read_cpu_limit(const std::filesystem::path& root = "/");

/// The cores of the main thread's affinity mask, ascending. Empty if the system does not tell.
[[nodiscard]] PACELINE_API std::vector<int> affinity_mask();

/// "0-3,8" -> 0 1 2 3 8, ascending and unique. Nothing if any part is malformed.
[[nodiscard]] PACELINE_API std::optional<std::vector<int>> parse_cpu_list(std::string_view text);

/// The same devices, with cores for GPUs' workers that hold one lock in turn, as Python's. If the GPUs lie on several
/// sockets, each gets all usable cores of one socket: that of most GPUs, and of the first GPU among equals. Otherwise
/// the lock would travel between sockets with each launch. A NUMA node stands for its socket if the system does not
/// tell sockets. Nothing changes if the GPUs lie on one socket or if that is unknown, or if the socket has fewer usable
/// cores than there are GPUs. Host devices keep their cores.
[[nodiscard]] PACELINE_API std::vector<Device> on_one_socket(std::vector<Device> devices, const HostTopology& topology);

/// The device host:`index`. From `device_count` on, host:`index` shares the cores of host:(index modulo device_count).
///
/// If there are as many devices as cores, each device gets one core. The first hyperthreads are dealt out first, so
/// that the devices of a small group do not share a physical core. If a quota allows fewer devices than there are
/// cores, each device gets a run of neighbouring cores, and every core is used. Otherwise two jobs with quotas would
/// both pin themselves to the machine's first cores.
[[nodiscard]] PACELINE_API Device host_device(const HostTopology& topology, std::int32_t index);

}  // namespace paceline

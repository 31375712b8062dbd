// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bitset>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline {

/// What keeps a clock below its maximum.
enum class ClockLimit : std::uint8_t {
  idle,                 ///< nothing to do
  application_setting,  ///< clocks that somebody has set
  power_cap,
  hardware_slowdown,  ///< the two hardware limits below, or one that has no name
  sync_boost,         ///< held to the clock of the slowest GPU of a group
  software_thermal,   ///< near the highest temperature of operation
  hardware_thermal,   ///< too hot: halved or less
  power_brake,        ///< the power supply asked for it: halved or less
  display_setting,
};
inline constexpr std::size_t kClockLimitCount = 9;

/// "the power cap", as it fits behind "because of".
[[nodiscard]] PACELINE_API std::string_view name_of(ClockLimit limit) noexcept;

/// Processes of others on a device.
struct OtherProcesses {
  std::int64_t count = 0;
  std::optional<std::uint64_t> memory_bytes{};
};

/// CPU time of a host device's cores since the system started, all cores added up.
struct CoreTimes {
  std::int64_t core_count = 0;
  std::chrono::nanoseconds busy{};    ///< whoever worked, this process included
  std::chrono::nanoseconds ours{};    ///< of this process, and no less: threads that may run anywhere are counted in
  std::chrono::nanoseconds stolen{};  ///< the hypervisor ran something else
};

/// How often the CPU quota of this process's cgroup was used up.
struct QuotaPeriods {
  std::int64_t total = 0;
  std::int64_t throttled = 0;
};

/// What a device's own sensors and counters say at one moment. Whatever is not known is empty; a difference of two
/// samples says more than one.
struct PACELINE_API DeviceHealth {
  std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now();
  std::optional<double> clock_hz{};  ///< of the SMs, or the mean of a host device's cores
  std::optional<double> max_clock_hz{};
  std::optional<std::bitset<kClockLimitCount>> limits{};  ///< in force now, by ClockLimit
  /// Time spent under each limit since some moment in the past, by ClockLimit.
  std::array<std::optional<std::chrono::nanoseconds>, kClockLimitCount> limited_for{};
  std::optional<double> temperature_celsius{};
  std::optional<double> power_watts{};
  std::optional<double> power_limit_watts{};
  std::optional<OtherProcesses> other_processes{};
  std::optional<CoreTimes> cores{};
  std::optional<QuotaPeriods> quota{};
  std::string why_none{};  ///< why nothing is known, as a sentence without its full stop; empty otherwise
};

/// The present state of a device, read when asked: no thread samples by itself. In the order of a millisecond.
/// @throws what the poll hook of waits does
[[nodiscard]] PACELINE_API DeviceHealth health_of(const Device& device);
/// The same of several devices, at one moment: what they have in common is read once.
[[nodiscard]] PACELINE_API std::vector<DeviceHealth> health_of(std::span<const Device> devices);

/// What may have slowed a device down between two of its samples, each as the rest of a sentence about it:
/// "its clock is at 1.20 of 1.98 GHz because of the power cap (61 % of the last 10 s)". Empty if nothing was noticed.
[[nodiscard]] PACELINE_API std::vector<std::string> causes_of(const DeviceHealth& before, const DeviceHealth& after);

}  // namespace paceline

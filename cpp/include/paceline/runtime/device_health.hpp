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
  idle,                 ///< there is no work
  application_setting,  ///< a clock that somebody has set
  power_cap,
  hardware_slowdown,  ///< one of the two hardware limits below, or an unnamed one
  sync_boost,         ///< the clock of the slowest GPU of a group
  software_thermal,   ///< close to the highest operating temperature
  hardware_thermal,   ///< too hot: the clock is halved or less
  power_brake,        ///< on request of the power supply: the clock is halved or less
  display_setting,
};
inline constexpr std::size_t kClockLimitCount = 9;

/// "the power cap": fits behind "because of".
[[nodiscard]] PACELINE_API std::string_view name_of(ClockLimit limit) noexcept;

/// Other processes on a device.
struct OtherProcesses {
  std::int64_t count = 0;
  std::optional<std::uint64_t> memory_bytes{};
};

/// CPU time of a host device's cores since the system started, summed over the cores.
struct CoreTimes {
  std::int64_t core_count = 0;
  std::chrono::nanoseconds busy{};    ///< by all processes, this one included
  std::chrono::nanoseconds ours{};    ///< at most this by this process: threads that are not pinned are counted in full
  std::chrono::nanoseconds stolen{};  ///< the hypervisor ran something else
};

/// How often this process's cgroup used up its CPU quota.
struct QuotaPeriods {
  std::int64_t total = 0;
  std::int64_t throttled = 0;
};

/// What a device's own sensors and counters say at one moment. Unknown values are empty. The difference of two samples
/// says more than one sample.
struct PACELINE_API DeviceHealth {
  std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now();
  std::optional<double> clock_hz{};  ///< of the SMs, or the mean over a host device's cores
  std::optional<double> max_clock_hz{};
  std::optional<std::bitset<kClockLimitCount>> limits{};  ///< the limits in force now, by ClockLimit
  /// Time spent under each limit, by ClockLimit, from a fixed moment in the past.
  std::array<std::optional<std::chrono::nanoseconds>, kClockLimitCount> limited_for{};
  std::optional<double> temperature_celsius{};
  std::optional<double> power_watts{};
  std::optional<double> power_limit_watts{};
  std::optional<OtherProcesses> other_processes{};
  std::optional<CoreTimes> cores{};
  std::optional<QuotaPeriods> quota{};
  std::string why_none{};  ///< why nothing is known, as a sentence without its full stop; empty if something is known
};

/// The present state of a device. Takes about a millisecond. No thread samples in the background.
/// @throws what the poll hook of waits throws
[[nodiscard]] PACELINE_API DeviceHealth health_of(const Device& device);
/// The state of several devices at one moment. Data that devices share is read once.
[[nodiscard]] PACELINE_API std::vector<DeviceHealth> health_of(std::span<const Device> devices);

/// What may have slowed a device down between two samples. Each cause continues a sentence about the device: "its clock
/// is at 1.20 of 1.98 GHz because of the power cap (61 % of the last 10 s)". Empty if no cause was found.
[[nodiscard]] PACELINE_API std::vector<std::string> causes_of(const DeviceHealth& before, const DeviceHealth& after);

}  // namespace paceline

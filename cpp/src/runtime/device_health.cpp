// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/device_health.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include <paceline/runtime/backend.hpp>

namespace paceline {
namespace {

using std::chrono::nanoseconds;

// Smaller fractions of time under a limit are not reported: every busy machine has them.
constexpr double kLeastLimited = 0.01;
constexpr double kLeastOther = 0.05;
constexpr double kLeastStolen = 0.02;
constexpr double kNearMaximum = 0.97;      // clocks move in steps of 15 MHz
constexpr double kLowWithoutReason = 0.7;  // with all cores busy, the clock stays below that of a single busy core

std::string text_of(nanoseconds time) {
  const double seconds = 1e-9 * static_cast<double>(time.count());
  if (seconds < 9.95) return fmt::format("{:.1f} s", seconds);
  if (seconds < 120.0) return fmt::format("{:.0f} s", seconds);
  if (seconds < 7200.0) return fmt::format("{:.0f} min", seconds / 60.0);
  return fmt::format("{:.0f} h", seconds / 3600.0);
}

/// Two samples of one device and the time between them.
struct Window {
  const DeviceHealth& before;
  const DeviceHealth& after;
  nanoseconds length = after.when - before.when;

  [[nodiscard]] double fraction(nanoseconds part) const {
    if (length <= nanoseconds::zero()) return 0.0;
    return std::clamp(static_cast<double>(part.count()) / static_cast<double>(length.count()), 0.0, 1.0);
  }
  [[nodiscard]] std::string last() const { return "the last " + text_of(length); }
  [[nodiscard]] bool now(ClockLimit limit) const {
    return after.limits && after.limits->test(static_cast<std::size_t>(limit));
  }
  [[nodiscard]] double limited(ClockLimit limit) const {
    const auto& from = before.limited_for[static_cast<std::size_t>(limit)];
    const auto& to = after.limited_for[static_cast<std::size_t>(limit)];
    return from && to ? fraction(*to - *from) : 0.0;
  }
};

std::string limit_text(ClockLimit limit, const DeviceHealth& health) {
  std::string text{name_of(limit)};
  const bool thermal = limit == ClockLimit::software_thermal || limit == ClockLimit::hardware_thermal;
  if (thermal && health.temperature_celsius) text += fmt::format(" at {:.0f} C", *health.temperature_celsius);
  if (limit == ClockLimit::power_cap && health.power_limit_watts) {
    text += fmt::format(" of {:.0f} W", *health.power_limit_watts);
  }
  return text;
}

std::vector<std::string> describe_limits(const Window& window) {
  std::vector<std::string> texts;
  const bool named = window.now(ClockLimit::hardware_thermal) ||
                     window.now(ClockLimit::power_brake);  // both also set hardware_slowdown
  for (std::size_t i = 0; i < kClockLimitCount; ++i) {
    const auto limit = static_cast<ClockLimit>(i);
    if (limit == ClockLimit::idle || (limit == ClockLimit::hardware_slowdown && named)) continue;
    const double fraction = window.limited(limit);
    if (fraction >= kLeastLimited) {
      texts.push_back(
          fmt::format("{} ({:.0f} % of {})", limit_text(limit, window.after), 100.0 * fraction, window.last()));
    } else if (window.now(limit)) {
      texts.push_back(limit_text(limit, window.after));
    }
  }
  return texts;
}

void describe_clock(const Window& window, std::vector<std::string>& causes) {
  const std::vector<std::string> limits = describe_limits(window);
  const DeviceHealth& after = window.after;
  double level = 1.0;
  if (after.clock_hz && after.max_clock_hz && *after.max_clock_hz > 0.0 && !window.now(ClockLimit::idle)) {
    level = *after.clock_hz / *after.max_clock_hz;
  }
  std::string text;
  if (level < (limits.empty() ? kLowWithoutReason : kNearMaximum)) {
    text = fmt::format("its clock is at {:.2f} of {:.2f} GHz", 1e-9 * *after.clock_hz, 1e-9 * *after.max_clock_hz);
  } else if (!limits.empty()) {
    text = "its clock was held down";
  } else {
    return;
  }
  if (!limits.empty()) text += fmt::format(" because of {}", fmt::join(limits, " and "));
  causes.push_back(std::move(text));
}

void describe_processes(const Window& window, std::vector<std::string>& causes) {
  const auto& others = window.after.other_processes;
  if (!others || others->count < 1) return;
  std::string text =
      others->count == 1 ? "another process uses it" : fmt::format("{} other processes use it", others->count);
  if (others->memory_bytes) {
    text += fmt::format(" ({:.1f} GiB)", static_cast<double>(*others->memory_bytes) / (1024.0 * 1024.0 * 1024.0));
  }
  causes.push_back(std::move(text));
}

void describe_cores(const Window& window, std::vector<std::string>& causes) {
  const auto& from = window.before.cores;
  const auto& to = window.after.cores;
  if (!from || !to || to->core_count < 1) return;
  const char* const whose = to->core_count == 1 ? "its core's" : "its cores'";
  const double stolen = window.fraction((to->stolen - from->stolen) / to->core_count);
  if (stolen >= kLeastStolen) {
    causes.push_back(fmt::format("the hypervisor gave {:.0f} % of {} time to other machines in {}", 100.0 * stolen,
                                 whose, window.last()));
  }
  const nanoseconds others = (to->busy - from->busy) - (to->ours - from->ours);
  const double other = window.fraction(others / to->core_count);
  if (other >= kLeastOther) {
    causes.push_back(
        fmt::format("other processes took {:.0f} % of {} time in {}", 100.0 * other, whose, window.last()));
  }
}

void describe_quota(const Window& window, std::vector<std::string>& causes) {
  const auto& from = window.before.quota;
  const auto& to = window.after.quota;
  if (!from || !to || to->total <= from->total || to->throttled <= from->throttled) return;
  const double fraction =
      static_cast<double>(to->throttled - from->throttled) / static_cast<double>(to->total - from->total);
  if (fraction < kLeastLimited) return;
  causes.push_back(fmt::format("the CPU quota of its cgroup was used up in {:.0f} % of the quota's periods in {}",
                               100.0 * fraction, window.last()));
}

}  // namespace

std::string_view name_of(ClockLimit limit) noexcept {
  constexpr std::string_view names[] = {"idleness",
                                        "the clocks that were set",
                                        "the power cap",
                                        "a slowdown by the hardware",
                                        "the slowest GPU of its boost group",
                                        "heat",
                                        "overheating",
                                        "the power supply's brake",
                                        "the display's clocks"};
  static_assert(std::size(names) == kClockLimitCount);
  const auto index = static_cast<std::size_t>(limit);
  return index < kClockLimitCount ? names[index] : "an unknown limit";
}

DeviceHealth health_of(const Device& device) { return backend_of(device).health({&device, 1}).front(); }

std::vector<DeviceHealth> health_of(std::span<const Device> devices) {
  std::vector<DeviceHealth> health(devices.size());
  for (const Backend* backend : backends()) {
    std::vector<Device> own;
    std::vector<std::size_t> index;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      if (devices[i].kind != backend->kind()) continue;
      own.push_back(devices[i]);
      index.push_back(i);
    }
    if (own.empty()) continue;
    std::vector<DeviceHealth> found = backend->health(own);
    for (std::size_t k = 0; k < own.size(); ++k) health[index[k]] = std::move(found[k]);
  }
  return health;
}

std::vector<std::string> causes_of(const DeviceHealth& before, const DeviceHealth& after) {
  const Window window{before, after};
  std::vector<std::string> causes;
  describe_clock(window, causes);
  describe_processes(window, causes);
  describe_cores(window, causes);
  describe_quota(window, causes);
  return causes;
}

}  // namespace paceline

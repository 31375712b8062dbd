// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/health_log.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

namespace paceline {
namespace {

// The system counts CPU time in hundredths of a second, so smaller shares are mostly rounding.
constexpr std::chrono::seconds kShortestWindow{1};

}  // namespace

bool needs_causes(const balance::DeviceReport& device) noexcept {
  if (device.retired || !device.measured) return false;
  return device.slowdown > 1.02 || 1.0 - device.speed > std::max(0.02, 2.0 * device.error);
}

HealthLog::HealthLog(std::vector<Device> devices, Sampler sampler)
    : devices_(std::move(devices)),
      sampler_(sampler ? std::move(sampler) : Sampler([](std::span<const Device> asked) { return health_of(asked); })),
      before_(sampler_(devices_)),
      after_(before_) {}

std::vector<std::string> HealthLog::causes(const balance::BalanceReport& report) {
  std::vector<std::string> texts(report.devices.size());
  if (std::none_of(report.devices.begin(), report.devices.end(), needs_causes)) return texts;
  if (report.steps != steps_) {
    Samples now = sampler_(devices_);
    if (steps_ > 0 && now.front().when - after_.front().when >= kShortestWindow) before_ = std::move(after_);
    after_ = std::move(now);
    steps_ = report.steps;
  }
  for (std::size_t i = 0; i < std::min(texts.size(), devices_.size()); ++i) {
    if (!needs_causes(report.devices[i])) continue;
    for (const std::string& cause : causes_of(before_[i], after_[i])) {
      texts[i] += (texts[i].empty() ? "" : "; ") + cause;
    }
  }
  return texts;
}

}  // namespace paceline

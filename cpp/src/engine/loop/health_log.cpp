// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/health_log.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <system_error>
#include <utility>

#include <paceline/runtime/blocking.hpp>

namespace paceline::internal {
namespace {

// The system counts CPU time in hundredths of a second, so smaller shares are mostly rounding.
constexpr std::chrono::seconds kShortestWindow{1};

bool is_gpu(const Device& device) { return device.kind != DeviceKind::host; }

/// Calls the sampler on a thread of its own, if that is wanted and one can be started; else when somebody asks.
std::future<HealthLog::Samples> sampled(bool beside, std::function<HealthLog::Samples()> sample) {
  try {
    return std::async(beside ? std::launch::async : std::launch::deferred, sample);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, std::move(sample));
  }
}

}  // namespace

bool needs_causes(const balance::DeviceReport& device) noexcept {
  if (device.retired || !device.measured) return false;
  return device.slowdown > 1.02 || 1.0 - device.speed > std::max(0.02, 2.0 * device.error);
}

HealthLog::HealthLog(std::vector<Device> devices, Sampler sampler)
    : devices_(std::move(devices)),
      sampler_(sampler ? std::move(sampler) : Sampler([](std::span<const Device> asked) { return health_of(asked); })),
      first_(sampled(std::ranges::any_of(devices_, is_gpu),
                     [sampler = sampler_, asked = devices_] { return sampler(asked); })) {
  if (std::ranges::none_of(devices_, is_gpu)) first_.wait();
}

std::vector<std::string> HealthLog::causes(const balance::BalanceReport& report) {
  std::vector<std::string> texts(report.devices.size());
  if (std::none_of(report.devices.begin(), report.devices.end(), needs_causes)) return texts;
  if (first_.valid()) {
    const BlockingRegion region;
    before_ = after_ = first_.get();
  }
  if (after_.empty()) before_ = after_ = sampler_(devices_);  // the first time has failed
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

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#include "balance/startup_cost.hpp"

#include "balance/bounded.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

// Other devices take over the work of a device that is late. So believing too late that it is late costs little, and
// believing it wrongly costs a device.
constexpr std::size_t kStartsKept = 33;
constexpr std::size_t kLeastStarts = 9;
constexpr double kNegligibleStart = 0.005;  // of the compute time, since threads never wake at the very same time
constexpr double kEarly = 0.5;              // of the median

}  // namespace

StartupCost::StartupCost(std::vector<double> given) {
  for (const double seconds : given) devices_.push_back({.given = seconds, .seconds = seconds});
}

void StartupCost::record(const std::vector<std::optional<double>>& seconds, double compute_seconds) {
  for (std::size_t i = 0; i < seconds.size() && i < devices_.size(); ++i) {
    if (!seconds[i]) continue;
    Device& device = devices_[i];
    const bool was_early = device.early;
    device.early =
        device.samples.size() >= kLeastStarts && device.seconds > 0.0 && *seconds[i] < kEarly * device.seconds;
    if (device.early && was_early) {
      device.samples.erase(device.samples.begin(), device.samples.end() - 1);
      device.early = false;
    }
    keep_last(device.samples, *seconds[i], kStartsKept);
    device.seconds = device.given;
    if (device.samples.size() < kLeastStarts) continue;
    const double typical = plan::median(device.samples);
    device.seconds = typical > kNegligibleStart * compute_seconds ? typical : 0.0;
  }
}

}  // namespace paceline::balance

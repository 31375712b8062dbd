// SPDX-License-Identifier: Apache-2.0
#include "balance/lent_time.hpp"

#include <algorithm>
#include <cmath>

#include "balance/bounded.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kLentKept = 9;
constexpr std::size_t kLeastLent = 5;
constexpr double kNegligibleLent = 0.005;  // half of what a move must promise at least
constexpr double kMostLent = 0.9;          // a device that lends all of its time would never be measured again

}  // namespace

void LentTime::record(std::span<const double> parts, const std::vector<bool>& worked) {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    Device& device = devices_[i];
    const double part = parts.empty() ? 0.0 : std::min(parts[i], kMostLent);
    if (!worked[i] || (part <= 0.0 && device.parts.empty())) continue;
    keep_last(device.parts, part, kLentKept);
    const bool lent = device.part > 0.0;
    device.part = device.error = 0.0;
    if (std::ranges::all_of(device.parts, [](double one) { return one <= 0.0; })) {
      device.parts.clear();
    } else if (device.parts.size() >= kLeastLent) {
      const double typical = plan::median(device.parts);
      if (typical >= kNegligibleLent) {
        std::vector<double> deviations;
        for (const double one : device.parts) deviations.push_back(std::abs(one - typical));
        const double deviation = plan::from_median_deviation(plan::median_in_place(deviations));
        device.part = typical;
        device.error = plan::median_error(deviation, device.parts.size()) / (1.0 - typical);
      }
    }
    changes_ += lent != (device.part > 0.0) ? 1 : 0;
  }
}

plan::CostModel LentTime::slowed(std::size_t device, const plan::CostModel& model) const {
  const double part = devices_[device].part;
  return part > 0.0 ? model.scaled(1.0 / (1.0 - part)) : model;
}

}  // namespace paceline::balance

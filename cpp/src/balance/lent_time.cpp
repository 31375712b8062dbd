// SPDX-License-Identifier: Apache-2.0
#include "balance/lent_time.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "balance/bounded.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kLentKept = 16;  // with 9, plans moved twice as often under requests at random
constexpr std::size_t kLeastLent = 5;
constexpr double kNegligibleLent = 0.005;  // half of what a move must promise at least
constexpr double kMostLent = 0.9;          // a device that lends all of its time would never be measured again

}  // namespace

void LentTime::record(std::span<const double> parts, const std::vector<bool>& worked) {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    Device& device = devices_[i];
    const double part = parts.empty() ? 0.0 : std::min(parts[i], kMostLent);
    if (device.parts.empty() && (!worked[i] || part <= 0.0)) continue;
    if (worked[i]) {
      keep_last(device.parts, part, kLentKept);
    } else {
      device.parts.erase(device.parts.begin());
    }
    device.part = device.error = 0.0;
    if (std::ranges::all_of(device.parts, [](double one) { return one <= 0.0; })) device.parts.clear();
    if (device.parts.size() < kLeastLent) continue;
    const auto count = static_cast<double>(device.parts.size());
    const double sum = std::accumulate(device.parts.begin(), device.parts.end(), 0.0);
    const double mean = std::min(sum / count, std::ranges::max(device.parts));  // rounding may exceed it
    if (mean < kNegligibleLent) continue;
    double squares = 0.0;
    for (const double one : device.parts) squares += (one - mean) * (one - mean);
    device.part = mean;
    device.error = std::sqrt(squares / (count * (count - 1.0))) / (1.0 - mean);
  }
}

bool LentTime::lends() const noexcept {
  return std::ranges::any_of(
      devices_, [](const Device& one) { return one.part > 0.0 || (!one.parts.empty() && one.parts.back() > 0.0); });
}

plan::CostModel LentTime::slowed(std::size_t device, const plan::CostModel& model) const {
  const double part = devices_[device].part;
  return part > 0.0 ? model.scaled(1.0 / (1.0 - part)) : model;
}

}  // namespace paceline::balance

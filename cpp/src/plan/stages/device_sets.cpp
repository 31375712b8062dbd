// SPDX-License-Identifier: Apache-2.0
#include "plan/stages/device_sets.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace paceline::plan {
namespace {

std::size_t set_count(const std::vector<std::vector<std::size_t>>& classes) {
  std::size_t count = 1;
  for (const auto& members : classes) {
    if (count > 1'000'000) break;
    count *= members.size() + 1;
  }
  return count;
}

}  // namespace

DeviceSets::DeviceSets(const StageCosts& costs, const std::vector<std::size_t>& order, std::size_t most) {
  if (order.empty()) {
    std::vector<std::size_t> devices(costs.devices());
    for (std::size_t i = 0; i < devices.size(); ++i) devices[i] = i;
    const auto speed = [&](std::size_t device) { return costs.problem().devices[device].speed; };
    std::ranges::stable_sort(devices, {}, [&](std::size_t i) { return std::pair(speed(i), costs.device_class(i)); });
    for (const std::size_t device : devices) {
      if (members_.empty() || costs.device_class(members_.back().back()) != costs.device_class(device))
        members_.emplace_back();
      members_.back().push_back(device);
    }
    while (set_count(members_) > most && members_.size() > 1) {
      std::size_t closest = 1;
      const auto ratio = [&](std::size_t i) { return speed(members_[i].back()) / speed(members_[i - 1].front()); };
      for (std::size_t i = 2; i < members_.size(); ++i)
        if (ratio(i) < ratio(closest)) closest = i;
      std::ranges::copy(members_[closest], std::back_inserter(members_[closest - 1]));
      members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(closest));
    }
  } else {
    members_.push_back(order);
  }
  used_.push_back(0);
  for (const std::vector<std::size_t>& members : members_) {
    stride_.push_back(used_.size());
    const std::size_t others = used_.size();
    for (std::size_t taken = 1; taken <= members.size(); ++taken)
      for (std::size_t i = 0; i < others; ++i) used_.push_back(used_[i] + taken);
  }
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "plan/stages/stage_costs.hpp"

namespace paceline::plan {

// All of 8 unlike devices have 256 sets. More sets than this take too long for plans in a second.
inline constexpr std::size_t kMostSets = 2048;

/// The sets of devices that the first stages of a pipeline may be on. Equal devices are exchangeable, so a set is a
/// number of devices of each class; these are used in a fixed order. A set has a greater number than its subsets.
class DeviceSets {
 public:
  /// `order`: of the devices, if it is given. With more sets than `most`, classes of similar speed are merged; their
  /// slower devices then come first. The slowest stage belongs first: the pipeline fills and drains behind it.
  DeviceSets(const StageCosts& costs, const std::vector<std::size_t>& order, std::size_t most);

  [[nodiscard]] std::size_t count() const { return used_.size(); }
  [[nodiscard]] std::size_t classes() const { return members_.size(); }
  /// How many devices are in a set.
  [[nodiscard]] std::size_t used(std::size_t set) const { return used_[set]; }
  /// Whether a class has devices that are not in the set.
  [[nodiscard]] bool has_more(std::size_t set, std::size_t group) const {
    return taken(set, group) < members_[group].size();
  }
  /// The first such device.
  [[nodiscard]] std::size_t next_device(std::size_t set, std::size_t group) const {
    return members_[group][taken(set, group)];
  }
  /// The set with this device, too.
  [[nodiscard]] std::size_t with(std::size_t set, std::size_t group) const { return set + stride_[group]; }
  [[nodiscard]] std::size_t without(std::size_t set, std::size_t group) const { return set - stride_[group]; }

 private:
  [[nodiscard]] std::size_t taken(std::size_t set, std::size_t group) const {
    return set / stride_[group] % (members_[group].size() + 1);
  }

  std::vector<std::vector<std::size_t>> members_;
  std::vector<std::size_t> stride_;
  std::vector<std::size_t> used_;
};

}  // namespace paceline::plan

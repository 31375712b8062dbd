// SPDX-License-Identifier: Apache-2.0
#include "comm/block_layout.hpp"

#include <algorithm>
#include <utility>

namespace paceline::internal {

BlockLayout::BlockLayout(std::vector<std::vector<std::size_t>> owned, std::size_t device_count)
    : owned_(std::move(owned)), slots_(device_count) {
  for (const std::vector<std::size_t>& devices : owned_) block_ = std::max(block_, devices.size());
  for (std::size_t space = 0; space < owned_.size(); ++space) {
    for (std::size_t i = 0; i < owned_[space].size(); ++i) {
      const DeviceId device = owned_[space][i];
      slots_[device] = space * block_ + i;
      natural_ = natural_ && slots_[device] == device;
    }
  }
  natural_ = natural_ && total() == device_count;
}

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include <paceline/device_id.hpp>

namespace paceline::internal {

/// Where the parts of all devices lie while they travel between memory spaces. Each space has one block, which holds
/// the parts of its devices. The blocks stand in the order of the spaces. All blocks have one size, because collectives
/// support no others.
class BlockLayout {
 public:
  /// owned[s] lists the devices of space s in ascending order. Each of the `device_count` devices is in one space.
  BlockLayout(std::vector<std::vector<std::size_t>> owned, std::size_t device_count);

  /// The devices of a space.
  [[nodiscard]] const std::vector<std::size_t>& owned(std::size_t space) const { return owned_[space]; }
  /// The number of parts in a block: that of the space with the most devices.
  [[nodiscard]] std::size_t block() const noexcept { return block_; }
  /// The number of parts in all blocks.
  [[nodiscard]] std::size_t total() const noexcept { return block_ * owned_.size(); }
  [[nodiscard]] std::size_t slot(DeviceId device) const { return slots_[device]; }
  /// Whether the blocks are the whole: the parts of all devices in order, without gaps.
  [[nodiscard]] bool natural() const noexcept { return natural_; }

 private:
  std::vector<std::vector<std::size_t>> owned_;
  std::vector<std::size_t> slots_;
  std::size_t block_ = 0;
  bool natural_ = true;
};

}  // namespace paceline::internal

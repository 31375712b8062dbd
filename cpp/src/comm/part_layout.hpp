// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace paceline::internal {

/// Where the parts of all devices lie while they are between memory spaces: one block per space, in their order, all of
/// one size (collectives know no others), each with the parts of its devices.
class PartLayout {
 public:
  /// owned[s]: the devices of space s, in ascending order; every one of `device_count` in exactly one space.
  PartLayout(std::vector<std::vector<std::size_t>> owned, std::size_t device_count);

  /// Of space s.
  [[nodiscard]] const std::vector<std::size_t>& owned(std::size_t space) const { return owned_[space]; }
  /// Parts in a block: as many as the space with the most devices needs.
  [[nodiscard]] std::size_t block() const noexcept { return block_; }
  /// Parts in all blocks.
  [[nodiscard]] std::size_t total() const noexcept { return block_ * owned_.size(); }
  [[nodiscard]] std::size_t slot(std::size_t device) const { return slots_[device]; }
  /// Whether every part lies where it lies in the whole, with nothing between.
  [[nodiscard]] bool natural() const noexcept { return natural_; }

 private:
  std::vector<std::vector<std::size_t>> owned_;
  std::vector<std::size_t> slots_;
  std::size_t block_ = 0;
  bool natural_ = true;
};

}  // namespace paceline::internal

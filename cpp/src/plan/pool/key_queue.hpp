// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <paceline/plan/pool_types.hpp>

namespace paceline::plan {

struct KeyEntry {
  double key = 0.0;
  JobId id{};
  friend auto operator<=>(const KeyEntry&, const KeyEntry&) = default;
};

/// Jobs in the order of their keys, ties in the order of submission. Sorted blocks of up to kBlock entries: an
/// insertion moves at most one block, the first entry of a block is erased without moving any, and the number of
/// entries before a key is a sum over blocks. With 100,000 entries each is below a microsecond; a balanced tree of them
/// misses the cache at each level, and std::set cannot count.
class KeyQueue {
 public:
  struct Place {
    std::size_t block = 0;
    std::size_t index = 0;
  };

  [[nodiscard]] bool empty() const noexcept { return blocks_.empty(); }
  [[nodiscard]] std::int64_t size() const noexcept { return size_; }
  [[nodiscard]] const KeyEntry& front() const { return blocks_.front().front(); }
  [[nodiscard]] Place begin() const noexcept { return {0, blocks_.empty() ? 0 : blocks_.front().first}; }

  void insert(KeyEntry entry) {
    ++size_;
    if (blocks_.empty()) return blocks_.push_back({{entry}});
    Place place = lower_bound(entry);
    if (place.block == blocks_.size()) place = {blocks_.size() - 1, blocks_.back().entries.size()};
    Block& block = blocks_[place.block];
    if (place.index == block.first && block.first > 0) {
      block.entries[--block.first] = entry;
      return;
    }
    block.entries.insert(block.entries.begin() + static_cast<std::ptrdiff_t>(place.index), entry);
    if (block.entries.size() < kBlock) return;
    const auto middle = block.entries.begin() + static_cast<std::ptrdiff_t>((block.first + kBlock) / 2);
    Block upper{{middle, block.entries.end()}};
    block.entries.erase(middle, block.entries.end());
    blocks_.insert(blocks_.begin() + static_cast<std::ptrdiff_t>(place.block) + 1, std::move(upper));
  }

  /// Requires that the entry is there.
  void erase(KeyEntry entry) {
    --size_;
    const Place place = entry == front() ? begin() : lower_bound(entry);  // most go from the front
    Block& block = blocks_[place.block];
    if (place.index == block.first) {
      ++block.first;
    } else {
      block.entries.erase(block.entries.begin() + static_cast<std::ptrdiff_t>(place.index));
    }
    if (block.first == block.entries.size()) blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(place.block));
  }

  /// The first entry that is not less.
  [[nodiscard]] Place lower_bound(KeyEntry entry) const {
    const auto block = std::partition_point(blocks_.begin(), blocks_.end(),
                                            [&](const Block& one) { return one.entries.back() < entry; });
    if (block == blocks_.end()) return {blocks_.size(), 0};
    const auto first = block->entries.begin() + static_cast<std::ptrdiff_t>(block->first);
    const auto found = std::lower_bound(first, block->entries.end(), entry);
    return {static_cast<std::size_t>(block - blocks_.begin()),
            static_cast<std::size_t>(found - block->entries.begin())};
  }

  [[nodiscard]] const KeyEntry* at(Place place) const {
    return place.block < blocks_.size() ? &blocks_[place.block].entries[place.index] : nullptr;
  }

  [[nodiscard]] Place next(Place place) const {
    if (++place.index < blocks_[place.block].entries.size()) return place;
    ++place.block;
    return {place.block, place.block < blocks_.size() ? blocks_[place.block].first : 0};
  }

  [[nodiscard]] std::int64_t count_before(KeyEntry entry) const {
    const Place place = lower_bound(entry);
    std::size_t count = place.block < blocks_.size() ? place.index - blocks_[place.block].first : 0;
    for (std::size_t i = 0; i < place.block; ++i) count += blocks_[i].entries.size() - blocks_[i].first;
    return static_cast<std::int64_t>(count);
  }

 private:
  static constexpr std::size_t kBlock = 512;
  struct Block {
    std::vector<KeyEntry> entries = {};  // those from `first` on; there is one at least
    std::size_t first = 0;
    [[nodiscard]] const KeyEntry& front() const { return entries[first]; }
  };
  std::vector<Block> blocks_;
  std::int64_t size_ = 0;
};

}  // namespace paceline::plan

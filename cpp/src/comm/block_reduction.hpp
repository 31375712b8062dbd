// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include <paceline/comm/reduce.hpp>

namespace paceline::internal {

/// A sum over many buffers. Any number of threads compute it together, in cache-sized blocks.
///
/// Threads claim blocks one by one. A thread on a busy core takes fewer blocks, and a thread that wakes late finds none
/// left. Each element is summed in the order of its inputs, so the result does not depend on which thread did what.
class BlockReduction {
 public:
  /// @throws InvalidArgument for a scale other than 1 with a type that cannot be scaled.
  explicit BlockReduction(std::vector<ReductionSegment> segments);
  /// Takes blocks until none are left. Returns true if every block is done, including those that other threads took.
  bool work() noexcept;

 private:
  struct Block {
    std::size_t segment;
    std::size_t begin;
    std::size_t count;
  };
  std::vector<ReductionSegment> segments_;
  std::vector<Block> blocks_;
  std::vector<std::size_t> claims_;  // claim c covers blocks [claims_[c], claims_[c + 1])
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> done_{0};
};

}  // namespace paceline::internal

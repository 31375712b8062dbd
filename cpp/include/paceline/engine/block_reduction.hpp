// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/export.hpp>

namespace paceline {

/// output[i] = scale * sum over k of inputs[k][i]. The output may be one of the inputs, else it overlaps none.
struct ReductionSegment {
  std::vector<const void*> inputs{};
  void* output = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
  double scale = 1.0;  ///< float32 and float64 only
};

/// A sum over many buffers that any number of threads work off together, in cache-sized blocks.
///
/// Blocks are claimed one by one, not dealt out beforehand: a thread on a busy core takes fewer, and one that wakes
/// late finds nothing left. Each element is summed in the order of its inputs, so the result does not depend on who did
/// what.
class PACELINE_API BlockReduction {
 public:
  /// @throws InvalidArgument for a scale other than 1 of a type that has none.
  explicit BlockReduction(std::vector<ReductionSegment> segments);
  /// Takes blocks until none are left. True when every block is done, also those that others took.
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

}  // namespace paceline

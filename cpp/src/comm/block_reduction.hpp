// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include <paceline/comm/reduce.hpp>

namespace paceline::internal {

/// Every output = scale * op over the inputs; without inputs it stays as it was. Each output is one of the inputs or
/// overlaps none of them.
struct BlockJob {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  double scale = 1.0;  ///< other than 1 for float32 and float64 only
};

/// Reductions over many buffers, or copies of one. Any number of threads compute them together, in cache-sized blocks.
///
/// Threads claim blocks one by one. A thread on a busy core takes fewer blocks, and a thread that wakes late finds none
/// left. Each element is reduced in the order of its inputs, so the result does not depend on which thread did what.
class BlockReduction {
 public:
  explicit BlockReduction(std::vector<BlockJob> jobs);
  /// @throws InvalidArgument for a scale other than 1 with a type that cannot be scaled.
  explicit BlockReduction(std::vector<ReductionSegment> segments);
  /// Takes blocks until none are left. Returns done().
  bool work() noexcept;
  /// Whether every block is done, including those that other threads took.
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire) == claims_.size() - 1; }

 private:
  struct Block {
    const BlockJob* job;
    std::size_t count;
    std::size_t first_input;   // in inputs_, where it has as many as the job
    std::size_t first_output;  // in outputs_
  };
  std::vector<BlockJob> jobs_;
  std::vector<Block> blocks_;
  // Where each block's inputs and outputs begin. They are listed beforehand, because work() cannot say that memory for
  // lists has run out.
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<std::size_t> claims_;  // claim c covers blocks [claims_[c], claims_[c + 1])
  // One cache line each: only these are written by all threads.
  alignas(64) std::atomic<std::size_t> next_{0};
  alignas(64) std::atomic<std::size_t> done_{0};
};

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include <paceline/runtime/device_group.hpp>

namespace paceline::internal {

/// Runs work(i) once for every block i < block_count. The worker that comes first takes the next block.
///
/// Complete when the last block is done. A worker that comes later finds nothing left, and nobody waits for it. What
/// work() writes is visible to the caller of DeviceGroup::run(). work() must not throw.
template <class Work>
class BlockTask final : public GroupTask {
 public:
  BlockTask(std::size_t block_count, Work work) : block_count_(block_count), work_(std::move(work)) {}

  void run(std::size_t) noexcept override {
    for (;;) {
      const std::size_t block = next_.fetch_add(1, std::memory_order_relaxed);
      if (block >= block_count_) return;
      work_(block);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == block_count_) wake_caller();
    }
  }

  [[nodiscard]] bool complete() const noexcept override {
    return done_.load(std::memory_order_acquire) == block_count_;
  }

 private:
  const std::size_t block_count_;
  const Work work_;
  // One cache line each: only these are written by all workers.
  alignas(64) std::atomic<std::size_t> next_{0};
  alignas(64) std::atomic<std::size_t> done_{0};
};

template <class Work>
void run_blocks(DeviceGroup& group, std::size_t block_count, Work work) {
  group.run(std::make_shared<BlockTask<Work>>(block_count, std::move(work)));
}

}  // namespace paceline::internal

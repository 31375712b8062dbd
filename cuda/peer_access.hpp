// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace paceline::cuda {

/// Which open GPUs access each other's memory. Access is enabled both ways between all GPUs that can. It covers all
/// memory of cudaMalloc, whoever allocated it, such as PyTorch's. Memory pools have access of their own (Pool).
/// Any thread.
class PeerAccess {
 public:
  /// Opens the GPU, and enables access between it and all GPUs that are open. The result lives as long as it has
  /// owners.
  [[nodiscard]] static std::shared_ptr<PeerAccess> open(int device);

  /// Whether two GPUs access each other's memory. A GPU accesses its own.
  [[nodiscard]] bool between(int one, int other) const;

 private:
  void add(int device);

  mutable std::mutex mutex_;
  std::set<int> open_;
  std::set<std::pair<int, int>> pairs_;  // the smaller number first
};

}  // namespace paceline::cuda

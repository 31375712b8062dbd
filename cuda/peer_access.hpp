// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "pool.hpp"

namespace paceline::cuda {

/// Which open GPUs access each other's memory. Access is enabled both ways between all GPUs that can. It covers all
/// memory of cudaMalloc, whoever allocated it, such as PyTorch's, and our pools. A pair is used only if what it copies
/// arrives (copies_arrive()). Otherwise its access is disabled again, and copies go through the host. Any thread.
class PeerAccess {
 public:
  /// Opens the GPU, and enables access between it and all GPUs that are open. `pool`: the GPU's. The result lives as
  /// long as it has owners.
  /// @throws OutOfMemory if there is none to check a link with
  [[nodiscard]] static std::shared_ptr<PeerAccess> open(int device, const std::shared_ptr<Pool>& pool);

  PeerAccess();
  /// Whether two GPUs access each other's memory. A GPU accesses its own, but for tests in which its parts stand for
  /// GPUs and access is switched off: then copies inside of its memory go through the host, too.
  [[nodiscard]] bool between(int one, int other) const;
  /// Whether CUDA grants the two GPUs access to each other, and what they copied arrived wrong.
  [[nodiscard]] bool wrong_between(int one, int other) const;
  /// Whether the source's streams make the copies from its memory to the target's (AsyncDevice::push_to).
  [[nodiscard]] bool pushed(int source, int target) const;
  /// Sets that, and returns what it was.
  bool push(int source, int target, bool on);

 private:
  using Pair = std::pair<int, int>;  // the smaller number first

  void add(int device, const std::shared_ptr<Pool>& pool);
  [[nodiscard]] bool connect(int device, Pool& pool, int other, Pool& pool_of_other);

  const bool within_;  // whether a GPU accesses its own memory
  mutable std::mutex mutex_;
  std::map<int, std::weak_ptr<Pool>> open_;  // a GPU whose pool is gone is closed
  std::set<Pair> pairs_;
  std::set<Pair> checked_;                // what they copied arrived
  std::set<Pair> wrong_;                  // it did not
  std::set<std::pair<int, int>> pushed_;  // source and target
};

}  // namespace paceline::cuda

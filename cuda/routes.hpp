// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "host_path.hpp"
#include "peer_access.hpp"
#include "pool.hpp"
#include "push_path.hpp"

namespace paceline::cuda {

/// How one open device's streams reach the memory of other GPUs. Shared with the streams. Any thread.
class Routes {
 public:
  Routes(int device, const std::shared_ptr<Pool>& pool) : peers_(PeerAccess::open(device, pool)) {}

  [[nodiscard]] bool direct(int one, int other) const { return peers_->between(one, other); }
  [[nodiscard]] bool wrong(int one, int other) const { return peers_->wrong_between(one, other); }
  [[nodiscard]] bool pushed(int source, int target) const { return peers_->pushed(source, target); }
  bool push(int source, int target, bool on) { return peers_->push(source, target, on); }
  [[nodiscard]] PushPath& by_source(int source, int target) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<PushPath>& path = pushes_[{source, target}];
    if (path == nullptr) path = std::make_unique<PushPath>(source, target);
    return *path;
  }
  /// HostPath::kAll as the target: to several GPUs at once.
  [[nodiscard]] HostPath& through_host(int source, int target) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<HostPath>& path = paths_[{source, target}];
    if (path == nullptr) path = HostPath::of(source, target);
    return *path;
  }

 private:
  std::shared_ptr<PeerAccess> peers_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::shared_ptr<HostPath>> paths_;
  std::map<std::pair<int, int>, std::unique_ptr<PushPath>> pushes_;
};

}  // namespace paceline::cuda

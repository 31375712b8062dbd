// SPDX-License-Identifier: Apache-2.0
#include "peer_access.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include <paceline/error.hpp>

#include "device_guard.hpp"
#include "error.hpp"

namespace paceline::cuda {
namespace {

/// Lets `device` access the memory of `peer`. False if it cannot, or if one of the two has failed. A failed GPU says so
/// in its own calls, and the others go on without it.
bool enable(int device, int peer) {
  try {
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, device, peer), "asking for its peers", device);
    if (can == 0) return false;
    const DeviceGuard guard(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) check(error, "enabling access to a peer", device);
    static_cast<void>(cudaGetLastError());  // PyTorch, for example, may have enabled it
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::shared_ptr<PeerAccess> PeerAccess::open(int device) {
  static std::mutex mutex;
  static auto* const known = new std::weak_ptr<PeerAccess>;  // never destroyed: CUDA must not be used at exit
  const std::lock_guard lock(mutex);
  std::shared_ptr<PeerAccess> access = known->lock();
  if (access == nullptr) *known = access = std::make_shared<PeerAccess>();
  access->add(device);
  return access;
}

void PeerAccess::add(int device) {
  const std::lock_guard lock(mutex_);
  open_.insert(device);
  for (const int other : open_) {
    if (other == device) continue;
    const std::pair<int, int> pair = std::minmax(device, other);
    pairs_.erase(pair);
    if (enable(device, other) && enable(other, device)) pairs_.insert(pair);
  }
}

bool PeerAccess::between(int one, int other) const {
  if (one == other) return true;
  const std::lock_guard lock(mutex_);
  return pairs_.contains(std::minmax(one, other));
}

}  // namespace paceline::cuda

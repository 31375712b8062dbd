// SPDX-License-Identifier: Apache-2.0
#include "peer_access.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <paceline/error.hpp>

#include "device_guard.hpp"
#include "error.hpp"
#include "partitions.hpp"
#include "peer_check.hpp"

namespace paceline::cuda {
namespace {

/// Lets `device` access the memory of `peer`. False if it cannot.
bool enable(int device, int peer) {
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, peer), "asking for its peers", device);
  if (can == 0) return false;
  const DeviceGuard guard(device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) check(error, "enabling access to a peer", device);
  static_cast<void>(cudaGetLastError());  // PyTorch, for example, may have enabled it
  return true;
}

/// Whether copies between GPUs shall all go through the host, to find out whether direct ones are the trouble.
bool is_switched_off() {
  const char* const value = std::getenv("PACELINE_PEER_ACCESS");
  return value != nullptr && std::string_view(value) == "0";
}

/// The driver then stages copies between the two, also those of PyTorch, which may have enabled the access before us.
void disable(int device, int peer) {
  const DeviceGuard guard(device);
  static_cast<void>(cudaDeviceDisablePeerAccess(peer));
  static_cast<void>(cudaGetLastError());
}

}  // namespace

PeerAccess::PeerAccess() : within_(!is_switched_off() || !parts_are_spaces()) {}

std::shared_ptr<PeerAccess> PeerAccess::open(int device, const std::shared_ptr<Pool>& pool) {
  static std::mutex mutex;
  static auto* const known = new std::weak_ptr<PeerAccess>;  // never destroyed: CUDA must not be used at exit
  const std::lock_guard lock(mutex);
  std::shared_ptr<PeerAccess> access = known->lock();
  if (access == nullptr) *known = access = std::make_shared<PeerAccess>();
  access->add(device, pool);
  return access;
}

void PeerAccess::add(int device, const std::shared_ptr<Pool>& pool) {
  const std::lock_guard lock(mutex_);
  open_[device] = pool;
  if (is_switched_off()) return;
  for (const auto& [other, weak] : open_) {
    const std::shared_ptr<Pool> pool_of_other = weak.lock();
    if (other == device || pool_of_other == nullptr) continue;
    const Pair pair = std::minmax(device, other);
    pairs_.erase(pair);
    if (wrong_.contains(pair)) continue;
    try {
      if (connect(device, *pool, other, *pool_of_other)) pairs_.insert(pair);
    } catch (const OutOfMemory&) {  // whether copies arrive is unknown, and the caller needs more memory than this
      throw;
    } catch (const Error&) {  // a GPU that has failed says so in its own calls; the others go on without it
    }
  }
}

bool PeerAccess::connect(int device, Pool& pool, int other, Pool& pool_of_other) {
  const Pair pair = std::minmax(device, other);
  if (!enable(device, other) || !enable(other, device)) return false;
  if (!pool.let_in(other) || !pool_of_other.let_in(device)) return false;  // the host's path serves all memory
  if (checked_.contains(pair)) return true;
  if (copies_arrive(device, pool, other, pool_of_other)) {
    checked_.insert(pair);
  } else {
    wrong_.insert(pair);
    disable(device, other);
    disable(other, device);
    pool.shut_out(other);
    pool_of_other.shut_out(device);
  }
  pool.trim();
  pool_of_other.trim();
  return checked_.contains(pair);
}

bool PeerAccess::between(int one, int other) const {
  if (one == other) return within_;
  const std::lock_guard lock(mutex_);
  return pairs_.contains(std::minmax(one, other));
}

bool PeerAccess::pushed(int source, int target) const {
  const std::lock_guard lock(mutex_);
  return pushed_.contains({source, target});
}

bool PeerAccess::push(int source, int target, bool on) {
  const std::lock_guard lock(mutex_);
  const bool was = pushed_.erase({source, target}) > 0;
  if (on) pushed_.emplace(source, target);
  return was;
}

bool PeerAccess::wrong_between(int one, int other) const {
  const std::lock_guard lock(mutex_);
  return wrong_.contains(std::minmax(one, other));
}

}  // namespace paceline::cuda

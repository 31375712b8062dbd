// SPDX-License-Identifier: Apache-2.0
#include "pool.hpp"

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>

#include "device_guard.hpp"
#include "driver.hpp"
#include "error.hpp"

namespace paceline::cuda {

std::shared_ptr<Pool> Pool::of(int device) {
  static std::mutex mutex;
  static auto* const pools = new std::map<int, std::weak_ptr<Pool>>;  // never destroyed: CUDA must not be used at exit
  const std::lock_guard lock(mutex);
  std::weak_ptr<Pool>& known = (*pools)[device];
  if (std::shared_ptr<Pool> pool = known.lock()) return pool;
  auto made = std::make_shared<Pool>(device);
  known = made;
  return made;
}

namespace {

/// Gives access to the GPUs that can access this one. Access to a GPU does not include its pools.
cudaError_t let_peers_in(cudaMemPool_t pool, int device) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  for (int peer = 0; peer < count && error == cudaSuccess; ++peer) {
    int can = 0;
    if (peer == device) continue;
    error = cudaDeviceCanAccessPeer(&can, peer, device);
    if (error != cudaSuccess || can == 0) continue;
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    error = cudaMemPoolSetAccess(pool, &access, 1);
  }
  return error;
}

}  // namespace

Pool::Pool(int device) : device_(device) {
  const DeviceGuard guard(device);
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  check(cudaMemPoolCreate(&pool_, &properties), "making a memory pool", device);
  // Keeps freed memory. By default every synchronisation in the process returns it to the system.
  std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
  int internal_dependencies = 0;
  cudaError_t error = cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &threshold);
  if (error == cudaSuccess) {
    error = cudaMemPoolSetAttribute(pool_, cudaMemPoolReuseAllowInternalDependencies, &internal_dependencies);
  }
  if (error == cudaSuccess) error = let_peers_in(pool_, device);
  if (error != cudaSuccess) {
    static_cast<void>(cudaMemPoolDestroy(pool_));
    check(error, "setting up a memory pool", device);
  }
}

Pool::~Pool() {
  destroy_on(device_, [this] { return cudaMemPoolDestroy(pool_); });
}

void* Pool::allocate(std::size_t bytes, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  void* data = nullptr;
  check(cudaMallocFromPoolAsync(&data, bytes, pool_, stream), "allocating memory", device_);
  return data;
}

void Pool::trim() {
  const DeviceGuard guard(device_);
  check(cudaMemPoolTrimTo(pool_, 0), "giving memory back", device_);
}

std::size_t Pool::attribute(cudaMemPoolAttr which) const {
  std::uint64_t value = 0;
  check(cudaMemPoolGetAttribute(pool_, which, &value), "asking a memory pool", device_);
  return static_cast<std::size_t>(value);
}

bool Pool::shares(const void* data) const {
  cudaMemPool_t owner = nullptr;
  int from_malloc = 0;
  CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* answers[] = {&owner, &from_malloc};
  const DeviceGuard guard(device_);
  const CUresult result =
      driver().pointer_attributes(2, asked, answers, static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(data)));
  check(result, "asking whose memory it is", device_);
  return owner == pool_ || (owner == nullptr && from_malloc != 0);
}

std::size_t Pool::bytes_in_use() const { return attribute(cudaMemPoolAttrUsedMemCurrent); }
std::size_t Pool::peak_bytes() const { return attribute(cudaMemPoolAttrUsedMemHigh); }

}  // namespace paceline::cuda

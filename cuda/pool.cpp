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

Pool::Pool(int device) : device_(device) {
  const DeviceGuard guard(device);
  if (cuda::attribute(cudaDevAttrMemoryPoolsSupported, device, 1) == 0) return;
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
  if (error != cudaSuccess) {
    static_cast<void>(cudaMemPoolDestroy(pool_));
    check(error, "setting up a memory pool", device);
  }
}

Pool::~Pool() {
  if (pool_ != nullptr) destroy_on(device_, [this] { return cudaMemPoolDestroy(pool_); });
}

void* Pool::allocate(std::size_t bytes, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  void* data = nullptr;
  if (pool_ == nullptr) {
    check(cudaMalloc(&data, bytes), "allocating memory", device_);
    const std::size_t now = used_ += bytes;
    for (std::size_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
  } else {
    check(cudaMallocFromPoolAsync(&data, bytes, pool_, stream), "allocating memory", device_);
  }
  return data;
}

cudaError_t Pool::release(void* data, std::size_t bytes, cudaStream_t stream) noexcept {
  if (pool_ != nullptr) return cudaFreeAsync(data, stream);
  used_ -= bytes;
  return cudaFree(data);  // waits until the GPU has done all its work
}

cudaError_t Pool::set_access(int peer, cudaMemAccessFlags flags) {
  cudaMemAccessDesc access{};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = peer;
  access.flags = flags;
  const DeviceGuard guard(device_);
  return cudaMemPoolSetAccess(pool_, &access, 1);
}

// Access to a GPU does not include its pools.
bool Pool::let_in(int peer) {
  const std::lock_guard lock(mutex_);
  if (pool_ == nullptr || peers_.contains(peer)) return true;
  if (set_access(peer, cudaMemAccessFlagsProtReadWrite) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  peers_.insert(peer);
  return true;
}

void Pool::shut_out(int peer) {
  const std::lock_guard lock(mutex_);
  if (peers_.erase(peer) == 0) return;
  static_cast<void>(set_access(peer, cudaMemAccessFlagsProtNone));
  static_cast<void>(cudaGetLastError());
}

void Pool::trim() {
  if (pool_ == nullptr) return;
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
  return owner == nullptr ? from_malloc != 0 : owner == pool_;
}

std::size_t Pool::bytes_in_use() const {
  return pool_ == nullptr ? used_.load() : attribute(cudaMemPoolAttrUsedMemCurrent);
}
std::size_t Pool::peak_bytes() const { return pool_ == nullptr ? peak_.load() : attribute(cudaMemPoolAttrUsedMemHigh); }

}  // namespace paceline::cuda

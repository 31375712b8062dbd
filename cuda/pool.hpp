// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <set>

namespace paceline::cuda {

/// This library's memory pool of one GPU. The default pool is not used, because its settings belong to others.
///
/// Memory freed on one stream goes to another stream only after the free has run. The pool does not make the second
/// stream wait for the first, because such hidden waits would serialise partitions.
///
/// Some GPUs have no pools, a virtual GPU without unified memory for example. There memory comes from cudaMalloc, and
/// giving it back waits for the GPU.
class Pool {
 public:
  /// The process's pool for a device. It lives as long as it has owners.
  [[nodiscard]] static std::shared_ptr<Pool> of(int device);

  explicit Pool(int device);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Allocates in the order of `stream`. @throws OutOfMemory
  [[nodiscard]] void* allocate(std::size_t bytes, cudaStream_t stream);
  /// Gives memory of allocate() back in the order of `stream`. The GPU is current.
  cudaError_t release(void* data, std::size_t bytes, cudaStream_t stream) noexcept;
  /// Lets another GPU, which accesses the memory of this one, access this memory, too. False if CUDA refuses.
  [[nodiscard]] bool let_in(int peer);
  void shut_out(int peer);
  /// Gives memory back that nothing uses.
  void trim();
  [[nodiscard]] std::size_t bytes_in_use() const;
  /// Whether peers may access this memory of the GPU: it is from this pool or from cudaMalloc. Other pools, and
  /// mappings such as PyTorch's expandable segments, give access to whom their owner chose.
  [[nodiscard]] bool shares(const void* data) const;
  [[nodiscard]] std::size_t peak_bytes() const;

 private:
  [[nodiscard]] std::size_t attribute(cudaMemPoolAttr which) const;

  [[nodiscard]] cudaError_t set_access(int peer, cudaMemAccessFlags flags);

  int device_;
  cudaMemPool_t pool_ = nullptr;  // null if the GPU has no pools
  std::mutex mutex_;
  std::set<int> peers_;                         // which are let in
  std::atomic<std::size_t> used_{0}, peak_{0};  // counted only without a pool
};

}  // namespace paceline::cuda

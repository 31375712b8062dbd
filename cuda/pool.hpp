// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

namespace paceline::cuda {

/// This library's memory pool of one GPU. The default pool is not used, because its settings belong to others.
///
/// Memory freed on one stream goes to another stream only after the free has run. The pool does not make the second
/// stream wait for the first, because such hidden waits would serialise partitions.
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
  /// Gives memory back that nothing uses.
  void trim();
  [[nodiscard]] std::size_t bytes_in_use() const;
  /// Whether peers may access this memory of the GPU: it is from this pool or from cudaMalloc. Other pools, and
  /// mappings such as PyTorch's expandable segments, give access to whom their owner chose.
  [[nodiscard]] bool shares(const void* data) const;
  [[nodiscard]] std::size_t peak_bytes() const;

 private:
  [[nodiscard]] std::size_t attribute(cudaMemPoolAttr which) const;

  int device_;
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace paceline::cuda

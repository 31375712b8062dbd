// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

namespace paceline::cuda {

/// This library's memory of one GPU. Never the default pool, whose settings belong to others.
///
/// Memory that was freed on one stream is given to another only once that free has run, not by making the second stream
/// wait for the first: such waits, which nobody wrote, would serialise partitions.
class Pool {
 public:
  /// The pool of the process for that device; it lives as long as somebody holds it.
  [[nodiscard]] static std::shared_ptr<Pool> of(int device);

  explicit Pool(int device);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// In the order of `stream`. @throws OutOfMemory
  [[nodiscard]] void* allocate(std::size_t bytes, cudaStream_t stream);
  [[nodiscard]] std::size_t bytes_in_use() const;
  [[nodiscard]] std::size_t peak_bytes() const;

 private:
  [[nodiscard]] std::size_t attribute(cudaMemPoolAttr which) const;

  int device_;
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace paceline::cuda

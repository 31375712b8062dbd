// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <span>
#include <vector>

#include "stream_shelf.hpp"

namespace paceline::cuda {

/// The GPU's SMs in as many groups of equal size as the driver allows. They come from one split, because only groups of
/// one split can be combined. May be empty. Makes no context.
/// @throws Unavailable if the driver is too old, Error if it refuses.
[[nodiscard]] std::vector<CUdevResource> split_sms(int device);

/// Some of a GPU's SMs, for streams. It never becomes current: NCCL and the runtime must see the GPU's primary context,
/// and a green context may be current to one thread only.
///
/// CUDA requires that its streams are destroyed first. So an owner of such a stream also owns this context.
class GreenContext {
 public:
  /// Requires: groups of one split_sms().
  GreenContext(int device, std::span<CUdevResource> groups);
  ~GreenContext();
  GreenContext(const GreenContext&) = delete;
  GreenContext& operator=(const GreenContext&) = delete;

  [[nodiscard]] int sm_count() const noexcept { return sm_count_; }
  [[nodiscard]] cudaStream_t make_stream();
  /// Keeps the stream for the next user. Its remaining work still runs; see idle().
  void drop(cudaStream_t stream) noexcept { shelf_.put(stream); }
  /// Whether all work of dropped streams is done. Only then may this object be destroyed.
  [[nodiscard]] bool idle() { return shelf_.idle(); }

 private:
  int device_;
  int sm_count_ = 0;
  CUgreenCtx context_ = nullptr;
  std::mutex mutex_;
  StreamShelf shelf_;
};

}  // namespace paceline::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <span>
#include <vector>

#include "stream_shelf.hpp"

namespace paceline::cuda {

/// The GPU's SMs as the driver deals them out: groups of equal size, as many as there can be. Of one split, since only
/// groups of one split can be put together. May be empty. Makes no context.
/// @throws Unavailable if the driver is too old, Error if it refuses.
[[nodiscard]] std::vector<CUdevResource> split_sms(int device);

/// Some of a GPU's SMs, for streams. It is never made current, neither here nor by others: NCCL and the runtime go on
/// to see the GPU's primary context, and a green context may be current to one thread only.
///
/// CUDA wants its streams to be destroyed before it: whoever holds a stream of it holds it too.
class GreenContext {
 public:
  /// Of these groups, which come from one split_sms().
  GreenContext(int device, std::span<CUdevResource> groups);
  ~GreenContext();
  GreenContext(const GreenContext&) = delete;
  GreenContext& operator=(const GreenContext&) = delete;

  [[nodiscard]] int sm_count() const noexcept { return sm_count_; }
  [[nodiscard]] cudaStream_t make_stream();
  /// Keeps the stream for the next one who needs one; what it still has to do is done meanwhile, see idle().
  void drop(cudaStream_t stream) noexcept { shelf_.put(stream); }
  /// Whether everything that dropped streams had to do is done. Only then may this be destroyed.
  [[nodiscard]] bool idle() { return shelf_.idle(); }

 private:
  int device_;
  int sm_count_ = 0;
  CUgreenCtx context_ = nullptr;
  std::mutex mutex_;
  StreamShelf shelf_;
};

}  // namespace paceline::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "device_guard.hpp"
#include "error.hpp"
#include "green_context.hpp"
#include "stream_shelf.hpp"

namespace paceline::cuda {

/// A stream of ours, on the whole GPU or on a part of it, or a stream that the caller owns. It is shared with the
/// memory that returns in its order.
class StreamHandle {
 public:
  StreamHandle(int device, std::shared_ptr<GreenContext> part) : device_(device), owned_(true), part_(std::move(part)) {
    if (part_ != nullptr) {
      stream_ = part_->make_stream();
      return;
    }
    stream_ = StreamShelf::of(device).take();
    if (stream_ != nullptr) return;
    const DeviceGuard guard(device);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream", device);
  }
  StreamHandle(int device, cudaStream_t stream) : device_(device), stream_(stream) {}
  ~StreamHandle() {
    if (!owned_) return;
    if (part_ != nullptr) {
      part_->drop(stream_);
    } else {
      StreamShelf::of(device_).put(stream_);
    }
  }
  StreamHandle(const StreamHandle&) = delete;
  StreamHandle& operator=(const StreamHandle&) = delete;

  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  int device_;
  bool owned_ = false;
  std::shared_ptr<GreenContext> part_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace paceline::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

namespace paceline::cuda {

/// Returned streams, for the next user. They are not destroyed, because others may still refer to them: PyTorch stores
/// with each tensor the streams that made and used it.
class StreamShelf {
 public:
  /// The process's shelf for streams on a whole GPU.
  [[nodiscard]] static StreamShelf& of(int device);
  /// Destroys the streams on all of these shelves.
  static void clear_all() noexcept;

  explicit StreamShelf(int device) : device_(device) {}
  ~StreamShelf() { clear(); }
  StreamShelf(const StreamShelf&) = delete;
  StreamShelf& operator=(const StreamShelf&) = delete;

  /// A stream without remaining work, or null.
  [[nodiscard]] cudaStream_t take();
  /// The stream may still have work.
  void put(cudaStream_t stream) noexcept;
  /// Whether all streams here have done their work. True for a lost device, which runs nothing any more.
  [[nodiscard]] bool idle();
  void clear() noexcept;

 private:
  int device_;
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace paceline::cuda

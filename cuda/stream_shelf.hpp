// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

namespace paceline::cuda {

/// Streams that were given back, for whoever needs one next. They are not destroyed, because others may know them for
/// longer: PyTorch remembers with every tensor the streams that it was made and used on.
class StreamShelf {
 public:
  /// The process's shelf for streams on the whole of a GPU.
  [[nodiscard]] static StreamShelf& of(int device);
  /// Destroys what lies on those.
  static void clear_all() noexcept;

  explicit StreamShelf(int device) : device_(device) {}
  ~StreamShelf() { clear(); }
  StreamShelf(const StreamShelf&) = delete;
  StreamShelf& operator=(const StreamShelf&) = delete;

  /// One that has nothing left to do, or null.
  [[nodiscard]] cudaStream_t take();
  /// May still have work to do.
  void put(cudaStream_t stream) noexcept;
  /// Whether all that lie here have done everything. On a lost device nothing runs any more.
  [[nodiscard]] bool idle();
  void clear() noexcept;

 private:
  int device_;
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace paceline::cuda

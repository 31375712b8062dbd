// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <paceline/runtime/async_device.hpp>

namespace paceline::cuda {

/// Copies from one GPU to another that cannot access its memory: through pinned host memory, in chunks. There are two
/// chunks, so that one is filled while the other is emptied. Nothing waits on the host. The driver's own copies between
/// such GPUs go through the host, too, but need not overlap with other work.
///
/// The copies of all streams take turns, in the order of the calls. Any thread.
class HostPath {
 public:
  static constexpr std::size_t kChunkBytes = std::size_t{4} << 20;  // large enough for the speed of the bus

  /// The process's path between two GPUs. It lives as long as it has owners.
  [[nodiscard]] static std::shared_ptr<HostPath> of(int source, int target);

  HostPath(int source, int target, std::size_t chunk_bytes = kChunkBytes);

  /// Copies in the order of `stream`, which records `begun`, an event of its device.
  void copy(Stream& stream, Event& begun, void* to, const void* from, std::size_t bytes);

 private:
  struct Chunk {
    std::unique_ptr<Event> filled;
    std::unique_ptr<Event> emptied;
    bool used = false;
    // The last one is in use. Smaller ones stay, because releasing pinned memory waits for all work of the GPU.
    std::vector<std::unique_ptr<Buffer>> memory;
  };

  std::mutex mutex_;
  std::size_t chunk_bytes_;
  MemoryPlace from_;
  MemoryPlace to_;
  std::unique_ptr<AsyncDevice> source_;
  std::unique_ptr<Stream> down_;  // source to host
  std::unique_ptr<Stream> up_;    // host to target
  Chunk chunks_[2];
  std::size_t next_ = 0;
};

}  // namespace paceline::cuda

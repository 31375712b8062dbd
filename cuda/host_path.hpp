// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <paceline/runtime/async_device.hpp>

namespace paceline::cuda {

/// Copies from one GPU to others that cannot access its memory: through pinned host memory, in chunks. There are two
/// chunks, so that one is filled while the other is emptied. Nothing waits on the host. The driver's own copies between
/// such GPUs go through the host, too, but need not overlap with other work.
///
/// Several GPUs that get the same memory all upload each chunk, which leaves the source once. A chunk is filled again
/// after the last of these uploads. A path to one GPU has chunks of its own, because it would wait for the slowest GPU
/// otherwise.
///
/// The copies of all streams take turns, in the order of the calls. Any thread.
class HostPath {
 public:
  static constexpr std::size_t kChunkBytes = std::size_t{4} << 20;  // large enough for the speed of the bus
  static constexpr int kAll = -1;                                   // in place of a target

  /// A GPU that gets the memory.
  struct Receiver {
    int target = 0;
    Stream* stream = nullptr;  ///< of any device; the copy is in its order
    Event* begun = nullptr;    ///< of that device, for the path to record
    void* to = nullptr;
  };

  /// The process's path between two GPUs, or from one to several at once (kAll). It lives as long as it has owners.
  [[nodiscard]] static std::shared_ptr<HostPath> of(int source, int target);

  explicit HostPath(int source, std::size_t chunk_bytes = kChunkBytes);

  /// Copies in the order of the receivers' streams. No two receivers have one target.
  /// @throws OutOfMemory without pinned memory; then nothing was enqueued
  void copy(std::span<const Receiver> receivers, const void* from, std::size_t bytes);

 private:
  struct Chunk {
    std::unique_ptr<Event> filled;
    std::map<int, std::unique_ptr<Event>> emptied;  // by target
    std::vector<const Event*> uploads;              // those of `emptied` that the next fill waits for
    // The last one is in use. Smaller ones stay, because releasing pinned memory waits for all work of the GPU.
    std::vector<std::unique_ptr<Buffer>> memory;
  };
  struct Target {
    std::unique_ptr<AsyncDevice> device;
    std::unique_ptr<Stream> up;  // host to target
  };

  [[nodiscard]] Target& open(int target);
  void reserve(Chunk& chunk, std::size_t bytes);
  /// Enqueues what fills the next chunk and empties it.
  void move(std::span<const Receiver> receivers, const void* from, std::size_t begin, std::size_t bytes);
  /// The streams wait for what was enqueued, as their owners believe.
  void end_what_failed(std::span<const Receiver> receivers) noexcept;

  std::mutex mutex_;
  std::size_t chunk_bytes_;
  MemoryPlace from_;
  std::unique_ptr<AsyncDevice> source_;
  std::unique_ptr<Stream> down_;  // source to host
  std::map<int, Target> targets_;
  Chunk chunks_[2];
  std::size_t next_ = 0;
};

}  // namespace paceline::cuda

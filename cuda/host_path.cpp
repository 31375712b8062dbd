// SPDX-License-Identifier: Apache-2.0
#include "host_path.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "cuda_device.hpp"

namespace paceline::cuda {

std::shared_ptr<HostPath> HostPath::of(int source, int target) {
  static std::mutex mutex;
  static auto* const paths = new std::map<std::pair<int, int>, std::weak_ptr<HostPath>>;  // never destroyed
  const std::lock_guard lock(mutex);
  std::weak_ptr<HostPath>& known = (*paths)[{source, target}];
  if (std::shared_ptr<HostPath> path = known.lock()) return path;
  auto made = std::make_shared<HostPath>(source, target);
  known = made;
  return made;
}

HostPath::HostPath(int source, int target, std::size_t chunk_bytes)
    : chunk_bytes_(chunk_bytes),
      from_{source},
      to_{target},
      source_(open_device(source)),
      down_(source_->make_stream()) {
  const std::unique_ptr<AsyncDevice> target_device = open_device(target);
  up_ = target_device->make_stream();
  for (Chunk& chunk : chunks_) {
    chunk.filled = source_->make_event(false);
    chunk.emptied = target_device->make_event(false);
  }
}

void HostPath::copy(Stream& stream, Event& begun, void* to, const void* from, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  stream.record(begun);
  down_->wait(begun);
  for (std::size_t begin = 0; begin < bytes;) {
    Chunk& chunk = chunks_[next_];
    next_ = 1 - next_;
    const std::size_t size = std::min(bytes - begin, chunk_bytes_);
    if (chunk.memory.empty() || chunk.memory.back()->bytes() < size) {
      const std::size_t doubled = chunk.memory.empty() ? 0 : 2 * chunk.memory.back()->bytes();
      chunk.memory.push_back(source_->allocate_pinned(std::min(std::max(size, doubled), chunk_bytes_)));
    }
    void* const host = chunk.memory.back()->data();
    if (chunk.used) down_->wait(*chunk.emptied);
    down_->copy(host, MemoryPlace::host, static_cast<const char*>(from) + begin, from_, size);
    down_->record(*chunk.filled);
    up_->wait(*chunk.filled);
    up_->copy(static_cast<char*>(to) + begin, to_, host, MemoryPlace::host, size);
    up_->record(*chunk.emptied);
    chunk.used = true;
    begin += size;
    if (begin == bytes) stream.wait(*chunk.emptied);
  }
}

}  // namespace paceline::cuda

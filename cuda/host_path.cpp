// SPDX-License-Identifier: Apache-2.0
#include "host_path.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include <paceline/error.hpp>

#include "cuda_device.hpp"

namespace paceline::cuda {

std::shared_ptr<HostPath> HostPath::of(int source, int target) {
  static std::mutex mutex;
  static auto* const paths = new std::map<std::pair<int, int>, std::weak_ptr<HostPath>>;  // never destroyed
  const std::lock_guard lock(mutex);
  std::weak_ptr<HostPath>& known = (*paths)[{source, target}];
  if (std::shared_ptr<HostPath> path = known.lock()) return path;
  auto made = std::make_shared<HostPath>(source);
  known = made;
  return made;
}

HostPath::HostPath(int source, std::size_t chunk_bytes)
    : chunk_bytes_(chunk_bytes), from_{source}, source_(open_device(source)), down_(source_->make_stream()) {
  for (Chunk& chunk : chunks_) chunk.filled = source_->make_event(false);
}

HostPath::Target& HostPath::open(int target) {
  Target& found = targets_[target];
  if (found.device == nullptr) found.device = open_device(target);
  if (found.up == nullptr) found.up = found.device->make_stream();
  for (Chunk& chunk : chunks_) {
    if (chunk.emptied[target] == nullptr) chunk.emptied[target] = found.device->make_event(false);
  }
  return found;
}

void HostPath::reserve(Chunk& chunk, std::size_t bytes) {
  if (!chunk.memory.empty() && chunk.memory.back()->bytes() >= bytes) return;
  const std::size_t doubled = chunk.memory.empty() ? 0 : 2 * chunk.memory.back()->bytes();
  chunk.memory.push_back(source_->allocate_pinned(std::min(std::max(bytes, doubled), chunk_bytes_)));
}

void HostPath::copy(std::span<const Receiver> receivers, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  for (const Receiver& one : receivers) static_cast<void>(open(one.target));
  // Both chunks, before anything is enqueued. If the second one were refused later, no stream would wait for the
  // uploads of the first one.
  for (std::size_t k = 0; k < std::size(chunks_) && k * chunk_bytes_ < bytes; ++k) {
    reserve(chunks_[(next_ + k) % std::size(chunks_)], std::min(bytes - k * chunk_bytes_, chunk_bytes_));
  }
  for (const Receiver& one : receivers) {
    one.stream->record(*one.begun);
    down_->wait(*one.begun);
  }
  try {
    for (std::size_t begin = 0; begin < bytes; begin += chunk_bytes_) {
      move(receivers, from, begin, std::min(bytes - begin, chunk_bytes_));
    }
    const Chunk& last = chunks_[1 - next_];
    for (const Receiver& one : receivers) one.stream->wait(*last.emptied.at(one.target));
  } catch (...) {
    end_what_failed(receivers);
    throw;
  }
}

void HostPath::move(std::span<const Receiver> receivers, const void* from, std::size_t begin, std::size_t bytes) {
  Chunk& chunk = chunks_[next_];
  next_ = 1 - next_;
  void* const host = chunk.memory.back()->data();
  for (const Event* const upload : chunk.uploads) down_->wait(*upload);
  chunk.uploads.clear();
  down_->copy(host, MemoryPlace::host, static_cast<const char*>(from) + begin, from_, bytes);
  down_->record(*chunk.filled);
  for (const Receiver& one : receivers) {
    Stream& up = *targets_.at(one.target).up;
    Event& emptied = *chunk.emptied.at(one.target);
    up.wait(*chunk.filled);
    up.copy(static_cast<char*>(one.to) + begin, MemoryPlace{one.target}, host, MemoryPlace::host, bytes);
    up.record(emptied);
    chunk.uploads.push_back(&emptied);
  }
}

void HostPath::end_what_failed(std::span<const Receiver> receivers) noexcept {
  const auto unless_lost = [](const auto& call) {
    try {
      call();
    } catch (const Error&) {  // that device has no work left; the others may have
    }
  };
  for (Chunk& chunk : chunks_) {
    unless_lost([&] { down_->record(*chunk.filled); });
    for (const Receiver& one : receivers) {
      unless_lost([&] {
        one.stream->wait(*chunk.filled);
        Event& emptied = *chunk.emptied.at(one.target);
        targets_.at(one.target).up->record(emptied);
        chunk.uploads.push_back(&emptied);
        one.stream->wait(emptied);
      });
    }
  }
}

}  // namespace paceline::cuda

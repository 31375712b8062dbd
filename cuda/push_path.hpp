// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include <paceline/runtime/async_device.hpp>

namespace paceline::cuda {

/// Copies from one GPU to another one that accesses its memory, by a stream of the source: over PCIe a write may be
/// faster than a read, which has to wait for its answers.
///
/// The copies of all streams take turns, in the order of the calls. Any thread.
class PushPath {
 public:
  PushPath(int source, int target);

  /// Copies in the order of `stream`, which records `begun`, an event of its device.
  void copy(Stream& stream, Event& begun, void* to, const void* from, std::size_t bytes);

 private:
  std::mutex mutex_;
  MemoryPlace from_;
  MemoryPlace to_;
  std::unique_ptr<AsyncDevice> source_;
  std::unique_ptr<Stream> out_;  // of the source
  std::unique_ptr<Event> pushed_;
};

}  // namespace paceline::cuda

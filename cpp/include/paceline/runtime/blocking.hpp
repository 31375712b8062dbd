// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include <paceline/export.hpp>

namespace paceline {

/// Hooks that a language runtime sets around every wait of this library. Example: enter() releases an interpreter lock
/// that the awaited worker needs, and leave() takes it again. enter() returns a token for leave(). Both run on the
/// waiting thread and must not throw.
///
/// Long waits call poll() with the token now and then, to see whether somebody interrupts the thread (Ctrl-C). If
/// poll() throws, the exception ends the wait, and leave() is not called for that token.
struct BlockingHooks {
  void* (*enter)() = nullptr;
  void (*leave)(void* token) = nullptr;
  void (*poll)(void* token) = nullptr;
};

/// Sets the hooks of the process. Call once, before any group exists.
PACELINE_API void set_blocking_hooks(BlockingHooks hooks) noexcept;

/// Calls the hooks around a wait. Lives on the stack. In a nested region enter() returns null, because the outer region
/// has released the lock already; poll() then polls for the outer region.
class PACELINE_API BlockingRegion {
 public:
  BlockingRegion() noexcept;
  ~BlockingRegion();
  BlockingRegion(const BlockingRegion&) = delete;
  BlockingRegion& operator=(const BlockingRegion&) = delete;

  /// Call this in a wait that may be long, as often as you like. It calls the poll hook every 50 ms. @throws what the
  /// hook throws
  void poll();

 private:
  BlockingRegion* outer_ = nullptr;
  void* token_ = nullptr;
  std::chrono::steady_clock::time_point next_poll_;
};

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include <paceline/export.hpp>

namespace paceline {

/// What a language runtime wants done around every wait of this library, e.g. letting go of an interpreter lock that
/// the awaited worker needs. enter() returns a token for leave(); both run on the waiting thread and must not throw.
///
/// Long waits call poll() with the token now and then, which looks whether somebody wants the thread (Ctrl-C). It may
/// throw whatever shall leave the wait: then the wait is over, and leave() is not called for that token.
struct BlockingHooks {
  void* (*enter)() = nullptr;
  void (*leave)(void* token) = nullptr;
  void (*poll)(void* token) = nullptr;
};

/// Sets the hooks of the process. Call once, before any group exists.
PACELINE_API void set_blocking_hooks(BlockingHooks hooks) noexcept;

/// Brackets a wait with the hooks. On the stack; inside of another one its polls are those of the outer one too, whose
/// enter() has let go of what the hooks are about.
class PACELINE_API BlockingRegion {
 public:
  BlockingRegion() noexcept;
  ~BlockingRegion();
  BlockingRegion(const BlockingRegion&) = delete;
  BlockingRegion& operator=(const BlockingRegion&) = delete;

  /// To be called in a wait that may be long, as often as one likes: asks the hook every 50 ms. @throws what that does
  void poll();

 private:
  BlockingRegion* outer_ = nullptr;
  void* token_ = nullptr;
  std::chrono::steady_clock::time_point next_poll_;
};

}  // namespace paceline

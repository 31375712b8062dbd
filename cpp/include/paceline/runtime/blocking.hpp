// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/export.hpp>

namespace paceline {

/// What a language runtime wants done around every wait of this library, e.g. letting go of an interpreter lock that
/// the awaited worker needs. enter() returns a token for leave(); both run on the waiting thread and must not throw.
struct BlockingHooks {
  void* (*enter)() = nullptr;
  void (*leave)(void* token) = nullptr;
};

/// Sets the hooks of the process. Call once, before any group exists.
PACELINE_API void set_blocking_hooks(BlockingHooks hooks) noexcept;

/// Brackets a wait with the hooks.
class PACELINE_API BlockingRegion {
 public:
  BlockingRegion() noexcept;
  ~BlockingRegion();
  BlockingRegion(const BlockingRegion&) = delete;
  BlockingRegion& operator=(const BlockingRegion&) = delete;

 private:
  void* token_ = nullptr;
};

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/blocking.hpp>

#include <atomic>

namespace paceline {
namespace {
// Two plain atomics instead of a locked struct: set once at import, read around every wait.
std::atomic<void* (*)()> enter_hook{nullptr};
std::atomic<void (*)(void*)> leave_hook{nullptr};
}  // namespace

void set_blocking_hooks(BlockingHooks hooks) noexcept {
  leave_hook.store(hooks.leave);
  enter_hook.store(hooks.enter);
}

BlockingRegion::BlockingRegion() noexcept {
  if (auto* enter = enter_hook.load(std::memory_order_relaxed)) token_ = enter();
}

BlockingRegion::~BlockingRegion() {
  if (token_ == nullptr) return;
  if (auto* leave = leave_hook.load(std::memory_order_relaxed)) leave(token_);
}

}  // namespace paceline

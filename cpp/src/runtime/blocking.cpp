// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/blocking.hpp>

#include <atomic>
#include <utility>

namespace paceline {
namespace {
// Plain atomics are enough: the hooks are set once, at import, and read around every wait.
std::atomic<void* (*)()> enter_hook{nullptr};
std::atomic<void (*)(void*)> leave_hook{nullptr};
std::atomic<void (*)(void*)> poll_hook{nullptr};

constexpr std::chrono::milliseconds kPollInterval(50);

thread_local BlockingRegion* innermost = nullptr;
}  // namespace

void set_blocking_hooks(BlockingHooks hooks) noexcept {
  leave_hook.store(hooks.leave);
  poll_hook.store(hooks.poll);
  enter_hook.store(hooks.enter);
}

BlockingRegion::BlockingRegion() noexcept : outer_(std::exchange(innermost, this)) {
  if (auto* enter = enter_hook.load(std::memory_order_relaxed)) token_ = enter();
  if (token_ != nullptr) next_poll_ = std::chrono::steady_clock::now() + kPollInterval;
}

BlockingRegion::~BlockingRegion() {
  innermost = outer_;
  if (token_ == nullptr) return;
  if (auto* leave = leave_hook.load(std::memory_order_relaxed)) leave(token_);
}

void BlockingRegion::poll() {
  auto* const hook = poll_hook.load(std::memory_order_relaxed);
  if (token_ == nullptr && outer_ != nullptr) return outer_->poll();
  if (token_ == nullptr || hook == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_poll_) return;
  next_poll_ = now + kPollInterval;
  void* const token = std::exchange(token_, nullptr);
  hook(token);
  token_ = token;
}

}  // namespace paceline

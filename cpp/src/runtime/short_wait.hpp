// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>

namespace paceline::internal {

/// Tells the processor that this thread spins.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits for a condition: spins before it sleeps, if the last wait was short.
///
/// Spinning for as long as a wake-up takes costs at most twice the better of spinning and sleeping (ski rental). After
/// a long wait nothing spins. So steps of milliseconds leave their cores to other programs, and workers stay awake only
/// for steps that follow each other at once. Never yields: a thread that yields its core to another program may get it
/// back only after that program's time slice, milliseconds later.
///
/// Threads: several may wait at once. They share what is known about the last wait.
template <class Clock>
class BasicShortWait {
 public:
  /// The wake-up time of a sleeping thread: 5 to 50 us, most of it for waking the core.
  static constexpr std::chrono::microseconds kSpin{50};
  /// A wait that would have ended within kSpin, plus the wake-up time if the thread slept.
  static constexpr std::chrono::microseconds kShort{100};

  /// Returns true once `done()`. Otherwise returns what `sleep()` returns, which sleeps until done or until its own
  /// time is over. `may_spin`: no thread that is waited for needs this core.
  template <class Done, class Sleep>
  bool until(bool may_spin, Done done, Sleep sleep) {
    const auto begin = Clock::now();
    const auto waited = [&] { return Clock::now() - begin; };
    bool over = false;
    if (may_spin && last_was_short_.load(std::memory_order_relaxed)) {
      while (!(over = done()) && waited() < kSpin) relax();
    }
    over = over || sleep();
    last_was_short_.store(waited() <= kShort, std::memory_order_relaxed);
    return over;
  }

 private:
  std::atomic<bool> last_was_short_{false};
};

using ShortWait = BasicShortWait<std::chrono::steady_clock>;

}  // namespace paceline::internal

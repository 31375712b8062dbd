// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>

namespace paceline::detail {

/// Tells the processor that this thread spins.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins before it sleeps, if the last wait was short.
///
/// Spinning for as long as a wake-up takes costs at most twice what the better of spinning and sleeping would have
/// (ski rental). After a long wait nothing spins at all: steps of milliseconds leave their cores to whoever else wants
/// them, and only steps that follow each other at once find their workers awake. Never yields: a thread that yields its
/// core to another program may get it back only after that program's slice, milliseconds later.
///
/// Threads: several may wait; they share what is known of the last wait.
template <class Clock>
class BasicShortWait {
 public:
  /// What it takes until a thread that sleeps runs again: 5 to 50 us, most of it to wake a core that sleeps, too.
  static constexpr std::chrono::microseconds kSpin{50};
  /// A wait that would have ended within kSpin, with the wake-up if it was slept through.
  static constexpr std::chrono::microseconds kShort{100};

  /// Returns true once `done()`, else what `sleep()` returns, which sleeps until then or until its own time is over.
  /// `may_spin`: nobody who is waited for needs this core.
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

}  // namespace paceline::detail

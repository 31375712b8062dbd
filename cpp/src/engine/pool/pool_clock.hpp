// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

namespace paceline::internal {

class PoolCore;

/// A thread that calls PoolCore::tick() when a time has come, also while every worker is busy. It sleeps until the
/// earliest time that was set, and setting a later one wakes nobody: a pool whose requests all have the same deadline
/// wakes the thread about once in that time. Deadlines that are no longer needed are not taken back.
class PoolClock {
 public:
  using Time = std::chrono::steady_clock::time_point;

  PoolClock() = default;
  /// Waits for the thread, unless it is this one. In a forked process, which has no such thread, it keeps what the
  /// thread uses.
  ~PoolClock();
  PoolClock(const PoolClock&) = delete;
  PoolClock& operator=(const PoolClock&) = delete;

  /// Starts the thread, which keeps the pool only while it calls it. One caller at a time. A second call does nothing.
  /// @throws Unavailable if the system gives no thread
  void start(std::weak_ptr<PoolCore> pool);
  [[nodiscard]] bool started() const noexcept { return state_ != nullptr; }
  /// Calls tick() at that time, or before. Any thread, once it is started.
  void set(Time time) noexcept;
  /// Lets the thread end. Any thread.
  void end() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread shares it
};

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include <paceline/runtime/blocking.hpp>

namespace paceline {

/// Waits until `done`. False after `timeout`. Releases the lock for each call of the poll hook.
/// @throws what the poll hook throws; the lock is then released
template <class Done>
bool wait_polled(BlockingRegion& region, std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                 std::chrono::nanoseconds timeout, Done done) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::nanoseconds slice = std::chrono::milliseconds(10);
  const Clock::time_point start = Clock::now();
  while (!done()) {
    const std::chrono::nanoseconds left = timeout - (Clock::now() - start);
    if (left <= std::chrono::nanoseconds(0)) return false;
    if (changed.wait_for(lock, std::min(left, slice), done)) return true;
    lock.unlock();
    region.poll();
    lock.lock();
  }
  return true;
}

}  // namespace paceline

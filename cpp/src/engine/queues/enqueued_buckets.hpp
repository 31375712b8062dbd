// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include <paceline/runtime/blocking.hpp>

#include "runtime/deadline.hpp"

namespace paceline::internal {

/// How many buckets of a step's parameters are on their way. One thread enqueues them. A stream that waited for a
/// bucket before would wait for the one of an earlier step, so others first wait here. Any thread.
class EnqueuedBuckets {
 public:
  static constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

  void set(std::size_t count) { set(count, nullptr); }
  /// No more will come, for this reason.
  void fail(std::exception_ptr error) { set(0, std::move(error)); }

  /// Waits until so many are enqueued. False: they were not within `timeout`. @throws what fail() was given
  [[nodiscard]] bool wait(std::size_t count, std::chrono::nanoseconds timeout) {
    const BlockingRegion region;
    std::unique_lock lock(mutex_);
    const auto known = [&] { return count_ >= count || error_ != nullptr; };
    if (!changed_.wait_for(lock, bounded(timeout), known)) return false;
    if (count_ < count) std::rethrow_exception(error_);
    return true;
  }

 private:
  void set(std::size_t count, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    count_ = count;
    error_ = std::move(error);
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t count_ = kAll;
  std::exception_ptr error_;
};

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <paceline/error.hpp>

namespace paceline::internal {

/// Steps that were committed, and whose times are not known yet. `Step` is a shared pointer to something with
/// settled(), and with settle(), which waits; both throw if a device has failed.
///
/// One thread adds and settles. Any thread may look() meanwhile: nobody waits inside of the lock, so the thread that
/// steps may note a step that another one waits for. Each step is noted once, in order, and one at a time.
template <class Step>
class Unsettled {
 public:
  void add(Step step) {
    const std::lock_guard lock(mutex_);
    steps_.push_back(std::move(step));
    stepping_ = std::this_thread::get_id();
  }
  /// How many steps there are, with those that `noted` says were noted.
  template <class Noted>
  [[nodiscard]] std::int64_t count(const Noted& noted) const {
    const std::lock_guard lock(mutex_);
    return noted() + static_cast<std::int64_t>(steps_.size());
  }
  void forget() noexcept {
    std::deque<Step> forgotten;  // ends outside of the lock
    const std::lock_guard lock(mutex_);
    forgotten.swap(steps_);
    failure_ = nullptr;
  }
  /// Calls `note` with the oldest steps, waiting for them, until at most `most` are left. Then with those that have
  /// settled. `note` must not wait.
  /// @throws what settle(), settled() and `note` throw. After an Error no step is left, so that a failed device is
  /// reported only once.
  template <class Note>
  void settle(std::size_t most, const Note& note) {
    try {
      throw_failure();
      Step oldest;
      advance(most, note, oldest);
    } catch (const Error&) {
      forget();
      throw;
    }
  }
  /// Settles all, for a caller that reads figures or changes devices. After an Error no step is left. An Error that
  /// another thread than that of the steps finds is also thrown by the next settle(), since whoever steps has to learn
  /// of it, but by no other look().
  template <class Note>
  void look(const Note& note) {
    Step oldest;
    try {
      advance(0, note, oldest);
    } catch (const Error&) {
      note_failure(oldest, std::current_exception());
      throw;
    }
  }

 private:
  void throw_failure() {
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  /// `oldest`: the step that it waits for, which is the one that has failed if it throws.
  template <class Note>
  void advance(std::size_t most, const Note& note, Step& oldest) {
    for (;;) {
      oldest = nullptr;  // ends outside of the lock
      bool waits = false;
      {
        const std::lock_guard lock(mutex_);
        if (steps_.empty()) return;
        oldest = steps_.front();
        waits = steps_.size() > most;
      }
      if (!waits && !oldest->settled()) return;
      oldest->settle();
      const std::lock_guard lock(mutex_);
      if (steps_.empty() || steps_.front() != oldest) continue;  // another thread has noted it
      note(*oldest);                                             // throws if the times cannot be read
      steps_.pop_front();
    }
  }
  void note_failure(const Step& failed, std::exception_ptr failure) {
    std::deque<Step> forgotten;  // ends outside of the lock
    const std::lock_guard lock(mutex_);
    const bool steps = stepping_ == std::this_thread::get_id();
    if (steps) failure_ = nullptr;
    if (steps_.empty() || steps_.front() != failed) return;  // another thread has thrown it
    forgotten.swap(steps_);
    if (!steps) failure_ = std::move(failure);
  }

  mutable std::mutex mutex_;
  std::deque<Step> steps_;      // oldest first
  std::exception_ptr failure_;  // what look() has thrown on another thread
  std::thread::id stepping_;    // the thread that has added the last one
};

}  // namespace paceline::internal

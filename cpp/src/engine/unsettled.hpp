// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include <paceline/error.hpp>

namespace paceline::internal {

/// Steps that were committed, and whose times are not known yet. `Step` is a pointer to something with settled(), and
/// with settle(), which waits; both throw if a device has failed. Not thread-safe.
template <class Step>
class Unsettled {
 public:
  void add(Step step) { steps_.push_back(std::move(step)); }
  void forget() noexcept { steps_.clear(); }
  /// Calls `note` with the oldest steps, waiting for them, until at most `most` are left. Then with those that have
  /// settled.
  /// @throws what settle() and settled() throw. After an Error no step is left, so that a failed device is reported
  /// only once.
  template <class Note>
  void settle(std::size_t most, const Note& note) {
    while (!steps_.empty()) {
      try {
        if (steps_.size() <= most && !steps_.front()->settled()) return;
        steps_.front()->settle();
      } catch (const Error&) {
        forget();
        throw;
      }
      const Step oldest = std::move(steps_.front());
      steps_.pop_front();
      note(*oldest);
    }
  }

 private:
  std::deque<Step> steps_;  // oldest first
};

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include <paceline/engine/objective.hpp>
#include <paceline/error.hpp>

namespace paceline {

namespace internal {
/// @throws InvalidArgument if an objective cannot be divided by this.
void check_weight(double total_weight);
}  // namespace internal

/// The number, or the error that reading it has thrown, or what reads it. Readers call that, perhaps several at once,
/// without the lock, because it waits for devices. The first outcome counts. If it throws anything but an Error, that
/// is no outcome, and the next reader calls it again. Any thread.
struct Objective::State {
  explicit State(double value) : value_(value) {}
  explicit State(std::function<double()> read) : read_(std::move(read)) {}

  [[nodiscard]] static Objective objective(std::shared_ptr<State> state) { return Objective(std::move(state)); }

  double get() {
    if (const std::function<double()> read = unread()) {
      try {
        decide(read(), nullptr);
      } catch (const Error&) {
        decide(0.0, std::current_exception());
      }
    }
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    return value_;
  }
  /// If nobody has read the number, readers get this error from now on, also those who wait for the number.
  void fail(const std::exception_ptr& error) { decide(0.0, error); }
  /// Reads the number, so that later failures do not change it. Requires: the devices are done.
  void settle() {
    try {
      static_cast<void>(get());
    } catch (...) {
      fail(std::current_exception());
    }
  }

 private:
  [[nodiscard]] std::function<double()> unread() {
    const std::lock_guard lock(mutex_);
    return read_;
  }
  void decide(double value, const std::exception_ptr& failure) {
    std::function<double()> read;  // destroyed without the lock, because the release of its memory may wait, too
    const std::lock_guard lock(mutex_);
    if (!read_) return;
    read.swap(read_);
    value_ = value;
    failure_ = failure;
  }

  std::mutex mutex_;
  double value_ = 0.0;
  std::exception_ptr failure_;
  std::function<double()> read_;
};

}  // namespace paceline

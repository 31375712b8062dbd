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

/// The number, or the error that reading it has thrown, or what reads it. The first reader calls that. If it throws
/// anything but an Error, the next reader calls it again. Any thread.
struct Objective::State {
  explicit State(double value) : value_(value) {}
  explicit State(std::function<double()> read) : read_(std::move(read)) {}

  [[nodiscard]] static Objective objective(std::shared_ptr<State> state) { return Objective(std::move(state)); }

  double get() {
    const std::lock_guard lock(mutex_);
    if (read_) {
      try {
        value_ = read_();
      } catch (const Error&) {
        failure_ = std::current_exception();
      }
      read_ = nullptr;  // and what it holds
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    return value_;
  }
  /// If nobody has read the number, readers get this error from now on.
  void fail(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    if (!read_) return;
    failure_ = error;
    read_ = nullptr;
  }
  /// Reads the number, so that later failures do not change it. Requires: the devices are done.
  void settle() {
    try {
      static_cast<void>(get());
    } catch (...) {
      fail(std::current_exception());
    }
  }

 private:
  std::mutex mutex_;
  double value_ = 0.0;
  std::exception_ptr failure_;
  std::function<double()> read_;
};

}  // namespace paceline

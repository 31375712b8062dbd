// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include <paceline/export.hpp>

namespace paceline {

namespace detail {
class TaskSignal;
}

/// Work for the workers of a group: run() is entered once on each device's worker thread, concurrently.
///
/// Requires: run() keeps its errors to itself. Guarantees: the workers hold the task only while they run it, and the
/// caller is woken when complete() turns true. A task runs once.
class PACELINE_API GroupTask {
 public:
  GroupTask();
  virtual ~GroupTask();
  GroupTask(const GroupTask&) = delete;
  GroupTask& operator=(const GroupTask&) = delete;

  virtual void run(std::size_t device_index) noexcept = 0;

  /// True when the caller may go on. By default when every worker has left; a task whose result is ready earlier
  /// (a late worker finds nothing to do) says so by overriding this and calling wake_caller().
  [[nodiscard]] virtual bool complete() const noexcept { return all_left(); }

 protected:
  [[nodiscard]] bool all_left() const noexcept {
    return left_.load(std::memory_order_acquire) == expected_.load(std::memory_order_relaxed);
  }
  /// Makes the waiting caller look at complete() again. Any thread.
  void wake_caller() noexcept;

 private:
  friend class DeviceGroup;
  friend class GroupWorkers;
  void leave() noexcept;

  std::shared_ptr<detail::TaskSignal> signal_;
  std::atomic<std::size_t> left_{0};
  std::atomic<std::size_t> expected_{0};
};

}  // namespace paceline

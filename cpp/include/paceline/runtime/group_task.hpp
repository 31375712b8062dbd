// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/work_source.hpp>

namespace paceline {

/// A source of one piece of work for each device: run() is entered once on each device's worker thread, concurrently.
///
/// Requires: run() keeps its errors to itself. Guarantees: the workers hold the task only while they run it, and the
/// caller is woken when complete() turns true. A task runs once.
class PACELINE_API GroupTask : public WorkSource {
 public:
  GroupTask();
  ~GroupTask() override;

  virtual void run(std::size_t device_index) noexcept = 0;

  /// True when the caller may go on. By default when every worker has left; a task whose result is ready earlier
  /// (a late worker finds nothing to do) says so by overriding this and calling wake_caller().
  [[nodiscard]] bool complete() const noexcept override { return all_left(); }

 protected:
  [[nodiscard]] bool all_left() const noexcept {
    return !taken_.empty() && left_.load(std::memory_order_acquire) == taken_.size();
  }

 private:
  void opened(std::size_t device_count) final;
  [[nodiscard]] NextWork next(std::size_t device, Clock::time_point now) noexcept final;
  void perform(std::size_t device, std::int64_t work, Turn& turn) final;
  void done(std::size_t device, std::int64_t work, const WorkTiming& timing) noexcept final;
  void failed(std::size_t device, std::int64_t work, std::exception_ptr error) noexcept final;
  void cancel(std::exception_ptr reason) noexcept final;

  std::vector<char> taken_;  // each entry is its worker's
  std::atomic<std::size_t> left_{0};
};

}  // namespace paceline

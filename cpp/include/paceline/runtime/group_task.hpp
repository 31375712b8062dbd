// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/work_source.hpp>

namespace paceline {

/// A source with one piece of work for each device that it is opened on. The worker threads of these devices call run()
/// once each, at the same time.
///
/// Requires: run() does not throw. Guarantees: a worker holds the task only while it runs the task, and the caller is
/// woken when complete() turns true. A task runs once.
class PACELINE_API GroupTask : public WorkSource {
 public:
  GroupTask();
  ~GroupTask() override;

  virtual void run(DeviceId device) noexcept = 0;

  /// True when the caller may go on: by default when every worker has left. A task whose result is ready earlier
  /// overrides this and calls wake_caller(); late workers then find nothing to do.
  [[nodiscard]] bool complete() const noexcept override { return all_left(); }

 protected:
  [[nodiscard]] bool all_left() const noexcept { return inside_.load(std::memory_order_acquire) == 0; }

 private:
  void opened(std::span<const DeviceId> devices) final;
  [[nodiscard]] NextWork next(DeviceId device, Clock::time_point now) noexcept final;
  void perform(DeviceId device, std::int64_t work, Turn& turn) final;
  void done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept final;
  void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept final;
  void cancel(std::exception_ptr reason) noexcept final;

  std::vector<std::pair<DeviceId, bool>> taken_;  // each worker writes only its own entry
  std::atomic<std::size_t> inside_{1};            // workers that have not left; not 0 before the task is opened
};

}  // namespace paceline

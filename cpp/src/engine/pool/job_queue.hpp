// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>

#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline::internal {

/// The stream of a GPU that a pool's jobs are enqueued on, and the events around the one that runs. For the worker
/// whose run it is; events may be asked on any thread.
class JobQueue {
 public:
  /// Null for a device whose work is done when its worker returns. @throws Error if the device refuses.
  [[nodiscard]] static std::unique_ptr<JobQueue> of(const Device& device);
  explicit JobQueue(std::unique_ptr<AsyncDevice> device);

  [[nodiscard]] Stream& stream() const noexcept { return *stream_; }
  /// @throws DeviceLost, Error if the device has failed
  void begin();
  /// Everything of the run is enqueued. A failure shows in done().
  void end() noexcept;
  [[nodiscard]] const Event& ended() const noexcept { return *ended_; }
  /// Whether the device has done the run. @throws DeviceLost, Error if it has failed
  [[nodiscard]] bool done() const;
  /// Of the run that is done, by the device's clock: from when the worker began.
  [[nodiscard]] double seconds() const { return ended_->seconds_since(*begun_); }

 private:
  std::unique_ptr<AsyncDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> begun_;
  std::unique_ptr<Event> ended_;
  std::exception_ptr failed_;  // by end()
};

}  // namespace paceline::internal

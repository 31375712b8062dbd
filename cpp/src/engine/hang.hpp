// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

/// Whether a device of a group hangs: it has not ended what it was given within the timeout of a wait. Every later wait
/// would take as long again, so it throws at once. Copies know the same. Any thread.
class Hang {
 public:
  explicit operator bool() const noexcept { return *found_; }
  void note() const noexcept { *found_ = true; }
  /// @throws as wait_for()
  void await(const Event& event, std::chrono::nanoseconds timeout) const;
  /// `call`: what the error begins with. @throws DeviceLost after a hang.
  void check(const char* call) const;
  /// Returns when the stream has no work left. One whose device has failed or hangs has none either. Both may be null.
  /// @throws what the poll hook of waits throws
  void drain(AsyncDevice* device, Stream* stream, std::chrono::nanoseconds timeout) const;

 private:
  std::shared_ptr<std::atomic<bool>> found_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace paceline::internal

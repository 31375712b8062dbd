// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>

namespace paceline::internal {

/// Who runs which items: the one queue through which every claim of a step goes. Thread-safe. Every item is handed out
/// exactly once, unless cancelled.
///
/// A claim is one short critical section, well under a microsecond, while a micro-batch takes hundreds. The lock keeps
/// "how much is left, who finishes when" consistent. The strategy decides what a device gets: PlannedClaims for items
/// that all cost the same, ItemClaims for items with costs, or a script.
class Claims {
 public:
  [[nodiscard]] static std::unique_ptr<Claims> of(StepOptions options);
  virtual ~Claims() = default;

  /// The next micro-batch of `device`, which is free at `now_seconds` on the step's clock; none when it is done.
  std::optional<MicroBatch> claim(DeviceId device, double now_seconds);
  /// After an empty claim(): whether the device should claim once more when it has run everything that it holds.
  [[nodiscard]] bool asks_again(DeviceId device);
  /// Whether nothing is left to hand out. The step need not wait for a device that has claimed nothing by then.
  [[nodiscard]] bool exhausted();
  /// From now on every claim comes back empty.
  void cancel();
  [[nodiscard]] bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

 protected:
  /// `shares`: the items of each device. With `stealing`, a device may take over items of others. A device whose share
  /// is 0 never does: the plan left it out because it does not pay.
  Claims(const std::vector<std::int64_t>& shares, bool stealing);
  /// Whether the device may still claim what is not its own.
  [[nodiscard]] bool may_come(DeviceId device) const { return devices_[device].takes_over && !devices_[device].left; }

 private:
  // Called under the lock. The base class sets the device and MicroBatch::last.
  /// The next of the device's own items; none when these are handed out.
  virtual std::optional<MicroBatch> own(DeviceId device) = 0;
  virtual std::optional<MicroBatch> take_over(DeviceId device, double now) = 0;
  /// The device gets this now.
  virtual void hand_out(MicroBatch& next, double now) = 0;
  [[nodiscard]] virtual bool has_own(DeviceId device) const = 0;
  [[nodiscard]] virtual bool nothing_left() const = 0;
  /// After an empty claim: whether it was too early to see if others are late.
  [[nodiscard]] virtual bool came_early(DeviceId /*device*/) const { return false; }
  /// The device will run everything that it holds before it claims again.
  virtual void runs_dry(DeviceId /*device*/) {}

  std::mutex mutex_;
  std::atomic<bool> cancelled_{false};
  struct DeviceState {
    bool takes_over = false;
    bool left = false;  // its last claim was empty, and it will not claim again
  };
  std::vector<DeviceState> devices_;
};

}  // namespace paceline::internal

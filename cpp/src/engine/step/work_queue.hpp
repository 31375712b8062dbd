// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>

namespace paceline::internal {

/// Who runs which items: the one queue through which every claim of a step goes. Thread-safe. Every item is handed out
/// exactly once, unless cancelled.
///
/// A claim is one short critical section, well under a microsecond, while a micro-batch takes hundreds. The lock keeps
/// "how much is left, who finishes when" consistent. A device is its place in the options' lists. The strategy decides
/// what a device gets: planned_queue() for items that all cost the same, item_queue() for items with costs, or a
/// script.
class WorkQueue {
 public:
  [[nodiscard]] static std::unique_ptr<WorkQueue> of(StepOptions options);
  virtual ~WorkQueue() = default;

  /// The next micro-batch of `device`, which is free at `now_seconds` on the step's clock; none when it is done. It
  /// does not say which device runs it.
  std::optional<MicroBatch> claim(std::size_t device, double now_seconds);
  /// After an empty claim(): whether the device should claim once more when it has run everything that it holds.
  [[nodiscard]] bool asks_again(std::size_t device);
  /// Whether nothing is left to hand out. The step need not wait for a device that has claimed nothing by then.
  [[nodiscard]] bool exhausted();
  /// From now on every claim comes back empty.
  void cancel();
  [[nodiscard]] bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

 protected:
  /// `shares`: the items of each device. With `stealing`, a device may take over items of others. A device whose share
  /// is 0 never does: the plan left it out because it does not pay.
  WorkQueue(const std::vector<std::int64_t>& shares, bool stealing);
  /// Whether the device may still claim what is not its own.
  [[nodiscard]] bool may_come(std::size_t device) const {
    return devices_[device].takes_over && !devices_[device].left;
  }

  /// The device from which another one takes work, and when it would finish if nothing were taken.
  struct Victim {
    std::size_t device = 0;
    double finish = 0.0;
  };
  /// The device, other than `thief`, that has items of its own left and would finish last. Among equals the first one.
  [[nodiscard]] std::optional<Victim> find_victim(std::size_t thief, double now) const;

  /// When a device will be free that was expected to be free at `expected`. If it is late by x, assume that it needs x
  /// more. This is right within a factor of two for any slowdown.
  static double free_at(double expected, double now) { return std::max(expected, 2.0 * now - expected); }

 private:
  // Called under the lock. The base class sets MicroBatch::last.
  /// The next of the device's own items; there are some.
  virtual MicroBatch own(std::size_t device) = 0;
  virtual std::optional<MicroBatch> take_over(std::size_t device, double now) = 0;
  /// The device gets this now.
  virtual void hand_out(std::size_t device, MicroBatch& next, double now) = 0;
  [[nodiscard]] virtual bool has_own(std::size_t device) const = 0;
  /// When the device will have run what is planned for it. Before anything was measured, the number of items that it
  /// has left: the device with most of them is the one to help.
  [[nodiscard]] virtual double finish_of(std::size_t device, double now) const = 0;
  /// Whether there are items that are no device's own.
  [[nodiscard]] virtual bool any_common() const { return false; }
  /// After an empty claim: whether it was too early to see if others are late.
  [[nodiscard]] virtual bool came_early(std::size_t /*device*/) const { return false; }
  /// The device will run everything that it holds before it claims again.
  virtual void runs_dry(std::size_t /*device*/) {}

  [[nodiscard]] bool nothing_left() const;

  std::mutex mutex_;
  std::atomic<bool> cancelled_{false};
  struct DeviceState {
    bool takes_over = false;
    bool left = false;  // its last claim was empty, and it will not claim again
  };
  std::vector<DeviceState> devices_;
};

/// The queue of a step whose items all cost the same.
///
/// The batch is divided as [device 0's chunk][device 1's chunk]...[pool]. A device first takes its own chunk, whole or
/// in micro-batches of the fixed size. Then it takes corrections from the pool, sized so that all devices finish
/// together (plan::next_correction). Then it steals from the back of another device's chunk what that device would
/// finish later. A device that holds micro-batches ahead gets the end of its chunk in pieces of the smallest
/// correction, so that it claims again when the last of these pieces begins.
[[nodiscard]] std::unique_ptr<WorkQueue> planned_queue(StepOptions options);

/// The queue of a step whose items have costs. Each device runs its packed micro-batches, longest items first. Then it
/// takes over work from the back of another device's list that this device would finish later.
///
/// It takes over a whole micro-batch, or its shorter half, or half of that, if it would not finish the whole in time.
/// The items at the back are the cheapest ones, so the devices' finishes are evened out in small steps. If `any_size`
/// is false, only whole micro-batches change hands, because devices that compile or choose algorithms by size would
/// meet new sizes. No part has fewer than `least` items.
[[nodiscard]] std::unique_ptr<WorkQueue> item_queue(std::shared_ptr<const BatchPlan> plan, bool stealing, bool any_size,
                                                    std::int64_t least = 1);

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/memory_model.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/memory_report.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline::internal {

/// The largest micro-batch of each device, for each kind of batch. It follows from a limit that was set, and from
/// memory that ran out.
///
/// Under a limit a device begins with small micro-batches of growing size until two sizes have been measured. A model
/// of these two predicts what fits. When memory runs out, all devices that share it run at most half as much at once
/// from then on. Any thread may call this.
class MemoryCaps {
 public:
  /// `limits`: bytes per device, 0 for none; or empty.
  /// @throws InvalidArgument for limits that are negative or do not fit the group.
  MemoryCaps(const DeviceGroup& group, const std::vector<std::int64_t>& limits);

  /// True if there is no limit and memory has not run out: then every micro-batch runs whole.
  [[nodiscard]] bool idle() const noexcept { return !any_limit_ && !any_cap_.load(std::memory_order_relaxed); }

  /// The end of the next piece to measure, which begins at `begin`. None if enough is known, or there are too few items
  /// to cut a piece off.
  [[nodiscard]] std::optional<std::int64_t> end_to_measure(DeviceId device, const BatchPlan& plan, std::int64_t begin,
                                                           std::int64_t end, std::int64_t least);
  /// Whether any piece is worth measuring: the device has a limit, and fewer than two sizes are known.
  [[nodiscard]] bool wants_more(DeviceId device, const BatchPlan& plan) const;
  /// Adds a measurement: the piece took at most this many bytes. Returns true if its size is new to the model.
  bool measured(DeviceId device, const BatchPlan& plan, std::int64_t begin, std::int64_t end, std::int64_t bytes);
  /// Cuts [begin, end) into as few pieces as possible that each fit. If pieces of equal size (to one item) fit too, it
  /// returns those. No piece has fewer than `least` items, even if only fewer would fit.
  [[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> pieces(DeviceId device, const BatchPlan& plan,
                                                                          std::int64_t begin, std::int64_t end,
                                                                          std::int64_t least) const;
  /// Memory ran out when these items ran at once. `limited`: the device's own limit was reached, not the shared
  /// memory's end. Returns false if nothing smaller can run.
  bool shrink(DeviceId device, const BatchPlan& plan, std::int64_t begin, std::int64_t end, std::int64_t least,
              bool limited);

  [[nodiscard]] std::vector<MemoryReport> report() const;
  /// One line for each memory that ran out and each device with a limit. Empty if there is neither.
  [[nodiscard]] std::string explain() const;

 private:
  using Key = std::optional<std::uint64_t>;  // BatchKind::memory; none: items have costs
  /// A value for each kind of batch. The oldest is dropped when there are too many.
  template <class Value>
  using Kinds = std::vector<std::pair<Key, Value>>;
  struct Cap {
    double size = 0.0;  // of the micro-batch that failed
    std::string why;
    /// The largest size to run at once. A single item is always tried.
    [[nodiscard]] double most() const { return size / 2.0; }
  };

  struct DeviceState {
    std::string name;
    std::string space;
    std::int64_t limit = 0;              // bytes; 0: none
    Kinds<balance::MemoryModel> models;  // under the lock
  };

  [[nodiscard]] double cap(const DeviceState& device, Key key) const;

  PerDevice<DeviceState> devices_;
  bool any_limit_;
  std::atomic<bool> any_cap_{false};
  mutable std::mutex mutex_;
  std::map<std::string, Kinds<Cap>> caps_;  // of memory spaces, and of devices with a limit
};

}  // namespace paceline::internal

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

#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/memory_report.hpp>
#include <paceline/runtime/device_group.hpp>

#include "balance/memory_model.hpp"

namespace paceline::engine {

/// The largest micro-batch of each device, for each kind of batch: by a limit that was set, and by memory that ran out.
///
/// Under a limit a device's first micro-batches are small and of growing size, until two sizes have been measured; the
/// model of these says what fits. Memory that ran out halves what runs at once from then on, on all devices that share
/// the memory. Any thread may call this.
class MemoryCaps {
 public:
  /// `limits`: bytes per device, 0 for none; or empty.
  /// @throws InvalidArgument for limits that are negative or do not fit the group.
  MemoryCaps(const DeviceGroup& group, std::vector<std::int64_t> limits);

  /// Whether every micro-batch runs whole, as long as memory does not run out.
  [[nodiscard]] bool idle() const noexcept { return !any_limit_ && !any_cap_.load(std::memory_order_relaxed); }

  /// The end of a piece from `begin` on that is to be measured. None: enough is known.
  [[nodiscard]] std::optional<std::int64_t> end_to_measure(std::size_t device, const BatchPlan& plan,
                                                           std::int64_t begin, std::int64_t end, std::int64_t least);
  /// Whether any piece is worth measuring: the device has a limit, and fewer than two sizes are known.
  [[nodiscard]] bool wants_more(std::size_t device, const BatchPlan& plan) const;
  /// The piece took so many bytes at most. True: a size was measured that the model did not know.
  bool measured(std::size_t device, const BatchPlan& plan, std::int64_t begin, std::int64_t end, std::int64_t bytes);
  /// Items [begin, end) in as few pieces as fit, of sizes that differ by one item at most where these fit, too. None
  /// has fewer than `least` items, even if that is what fits, unless there are fewer.
  [[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> pieces(std::size_t device, const BatchPlan& plan,
                                                                          std::int64_t begin, std::int64_t end,
                                                                          std::int64_t least) const;
  /// Memory ran out with these items at once. `limited`: it was the device's limit, not the memory that it shares.
  /// False: nothing smaller can be run.
  bool shrink(std::size_t device, const BatchPlan& plan, std::int64_t begin, std::int64_t end, std::int64_t least,
              bool limited);

  [[nodiscard]] std::vector<MemoryReport> report() const;
  /// Lines for memory that ran out, and for each device that has a limit; empty if there are none.
  [[nodiscard]] std::string explain() const;

 private:
  using Key = std::optional<std::uint64_t>;  // BatchKind::memory; none: items have costs
  /// Of several kinds of batches; the kind that was added first is forgotten where there are too many.
  template <class Value>
  using Kinds = std::vector<std::pair<Key, Value>>;
  struct Cap {
    double size = 0.0;  // of the micro-batch that failed
    std::string why;
    /// An item alone is always tried.
    [[nodiscard]] double most() const { return size / 2.0; }
  };

  [[nodiscard]] double cap(std::size_t device, Key key) const;
  [[nodiscard]] const balance::MemoryModel* model(std::size_t device, Key key) const;

  std::vector<std::string> names_;
  std::vector<std::string> spaces_;
  std::vector<std::int64_t> limits_;
  bool any_limit_;
  std::atomic<bool> any_cap_{false};
  mutable std::mutex mutex_;
  std::vector<Kinds<balance::MemoryModel>> models_;  // per device
  std::map<std::string, Kinds<Cap>> caps_;           // of memory spaces, and of devices with a limit
};

}  // namespace paceline::engine

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/device_id.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/item_arrangement.hpp>

namespace paceline {

struct StepRecord;

/// The kind of a batch: what it has in common with earlier batches, apart from the number of its items. A StepLoop
/// remembers a limited number of kinds.
struct BatchKind {
  std::uint64_t memory = 0;  ///< an item takes the same memory in all batches with this number
  std::uint64_t speed = 0;   ///< batches with this number and the same size take the same time
  /// Whether the StepLoop may choose the size of the micro-batches, to find a faster one.
  bool any_size = true;
};

/// Which device runs which items of a batch, and the balancer's decision behind that. StepLoop::plan makes the plan,
/// and the step carries it.
///
/// Without costs the devices' items follow each other in the batch's own order, and the arrangement is empty.
///
/// With costs, positions are those of arrangement.order: a micro-batch [begin, end) is the items
/// order[begin] to order[end - 1] of the caller's batch. Each micro-batch holds items of one device only. The items of
/// a device descend in cost, so the first item of a micro-batch is its longest.
struct PACELINE_API BatchPlan {
  std::int64_t size = 0;             ///< items
  std::vector<DeviceId> devices;     ///< those of the group; "per device" below is in this order
  std::vector<std::int64_t> shares;  ///< items per device
  BatchKind kind{};                  ///< without costs only: costs tell what items are like
  balance::StepPlan balance;         ///< the balancer's plan, in items; with costs in millionths of the first batch

  // With costs only.
  std::vector<double> costs;             ///< the caller's, in the caller's order
  std::vector<double> ordered_costs;     ///< in the order of positions
  double least_cost = 1.0;               ///< the least one above zero
  plan::ItemArrangement arrangement;     ///< which device runs what, in which micro-batches
  std::vector<plan::ItemShape> shapes;   ///< per device: the cost of a micro-batch, in the units of work of `balance`
  std::vector<double> seconds_per_work;  ///< per device; empty before the first timing

  [[nodiscard]] bool by_cost() const noexcept { return !costs.empty(); }
  /// The caller's indices of the items of the micro-batch [begin, end). With costs only.
  [[nodiscard]] std::span<const std::int64_t> items(std::int64_t begin, std::int64_t end) const noexcept {
    return std::span(arrangement.order).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
  }
  /// The work of the micro-batch [begin, end) on the device at this place of `devices`, by its shape. With costs only.
  [[nodiscard]] double work(std::size_t place, std::int64_t begin, std::int64_t end) const noexcept;
  /// The size that the memory for the micro-batch [begin, end) grows with: the number of its items; with costs this
  /// number times the longest item's cost.
  [[nodiscard]] double memory_size(std::int64_t begin, std::int64_t end) const noexcept;
  /// The cost of the items that each device ran in this step. Empty without costs.
  [[nodiscard]] std::vector<double> costs_of(const StepRecord& record) const;
  /// The times that the balancer gets of a step that ran by this plan. With costs these are each device's work and
  /// time, without the micro-batches whose times are no evidence, and the step's time scaled to a batch of
  /// balance.batch_size.
  [[nodiscard]] balance::StepTimings timings(const StepRecord& record) const;
};

/// The padding of micro-batches whose items are padded to the longest. All numbers are costs.
struct ItemPadding {
  double own = 0.0;         ///< the sum of the items' own costs
  double padded = 0.0;      ///< of the micro-batches that ran: number of items times the longest item's cost
  double contiguous = 0.0;  ///< the same for micro-batches of the same sizes, cut from the batch in the caller's order

  /// The part of the padding of contiguous slices that sorting has saved; 0 where there was none.
  [[nodiscard]] double saved() const noexcept {
    return contiguous > own ? (contiguous - padded) / (contiguous - own) : 0.0;
  }
};

/// What items cost in time, as learned from the steps so far, and the padding that packing by length has saved.
struct ItemReport {
  std::int64_t steps = 0;    ///< recorded steps with costs
  bool fitted = false;       ///< false: the given costs are used as they are, and `shape` and `error` are 0
  std::string device_class;  ///< the class that ran most of the fitted micro-batches; empty before the first fit
  plan::ItemShape shape;     ///< in seconds, on the fastest device of that class
  double error = 0.0;        ///< relative root mean square of predicted against measured micro-batches
  std::int64_t samples = 0;  ///< fitted micro-batches
  ItemPadding padding;       ///< totals of all steps
};

}  // namespace paceline

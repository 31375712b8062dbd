// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/item_arrangement.hpp>

namespace paceline {

struct StepRecord;

/// Which batches are alike, beside the number of their items. Of more than a few kinds the oldest are forgotten.
struct BatchKind {
  std::uint64_t memory = 0;  ///< of batches with equal numbers each item takes the same memory
  std::uint64_t speed = 0;   ///< batches with equal numbers and as many items take the same time
  /// Whether the step may run in micro-batches of a size that the step_loop tries, or has found to be faster.
  bool any_size = true;
};

/// What one step runs of a batch, and by which decision. StepLoop::plan makes it, and the step carries it.
///
/// Where all items cost the same, the devices' items lie in the batch's own order, and the arrangement is empty.
///
/// Where each item has a cost, positions are those of arrangement.order: a micro-batch [begin, end) is the items
/// order[begin] to order[end - 1] of the caller's batch. Each micro-batch holds items of one device only. The items of
/// a device descend in cost, so the first item of a micro-batch is its longest.
struct PACELINE_API BatchPlan {
  std::int64_t size = 0;             ///< items
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
  /// Work of the micro-batch [begin, end) on this device, by its shape. With costs only.
  [[nodiscard]] double work(std::size_t device, std::int64_t begin, std::int64_t end) const noexcept;
  /// What the memory for the micro-batch [begin, end) grows with: its items, or with costs these times the longest.
  [[nodiscard]] double memory_size(std::int64_t begin, std::int64_t end) const noexcept;
  /// What each device's items of this step cost; empty without costs.
  [[nodiscard]] std::vector<double> costs_of(const StepRecord& record) const;
  /// What the balancer is told of a step that ran by this plan. With costs: each device's work and time, without
  /// micro-batches whose times are no evidence; and the step's time as it would be for a batch of balance.batch_size.
  [[nodiscard]] balance::StepTimings timings(const StepRecord& record) const;
};

/// Costs of what ran: each micro-batch's count times its longest item.
struct ItemPadding {
  double own = 0.0;         ///< the items' costs themselves, nothing padded
  double padded = 0.0;      ///< of the micro-batches that ran
  double contiguous = 0.0;  ///< of as many micro-batches of the same sizes, cut from the batch in the caller's order

  /// The part of the padding of contiguous slices that sorting has saved; 0 where there was none.
  [[nodiscard]] double saved() const noexcept {
    return contiguous > own ? (contiguous - padded) / (contiguous - own) : 0.0;
  }
};

/// What was learned of what items cost, and what packing them by length has brought.
struct ItemReport {
  std::int64_t steps = 0;    ///< recorded, with costs
  bool fitted = false;       ///< false: the costs are taken as they were given; `shape` and `error` are then 0
  std::string device_class;  ///< the one that ran most of what was fitted; empty before
  plan::ItemShape shape;     ///< in seconds, on the fastest device of that class
  double error = 0.0;        ///< relative root mean square of predicted against measured micro-batches
  std::int64_t samples = 0;  ///< micro-batches that it was fitted to
  ItemPadding padding;       ///< totals of all steps
};

}  // namespace paceline

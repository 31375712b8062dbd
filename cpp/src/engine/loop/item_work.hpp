// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/step.hpp>

#include "engine/loop/item_shapes.hpp"

namespace paceline::internal {

/// @throws InvalidArgument without costs, and for one that is negative or not finite.
void check_costs(std::span<const double> costs);

/// Translates batches with costs into units of work for a balancer.
///
/// The balancer splits units of work instead of items. The first batch is a million units, however many items it has.
/// The items of each batch are then dealt out so that the devices' work is in proportion to the balancer's shares. This
/// class learns how much work a micro-batch is (ItemShapes). It scales the units so that the micro-batches in the
/// window keep their total work; otherwise a better shape would look like a change of the devices' speeds.
///
/// Batch sizes are rounded for the balancer. A batch whose cost is within a factor of sqrt(2) of an earlier batch size
/// counts as that size: as the last one if possible, otherwise as the nearest. So any two sizes are further apart than
/// that, and there are at most two sizes for each doubling of the cost.
class ItemWork {
 public:
  /// `device_classes`: one per device; devices of one class share a shape. `micro_batch`: the most items of a
  /// micro-batch; 0: no limit. `plain_costs`: see plan::ArrangementOptions.
  ItemWork(const std::vector<std::string>& device_classes, std::int64_t micro_batch, bool plain_costs);

  /// The batch size that the balancer is asked for, in units of work.
  /// Requires: check_costs().
  [[nodiscard]] std::int64_t batch_units(std::span<const double> costs) const;
  /// Notes that a batch has these costs. Returns batch_units().
  std::int64_t begin(std::span<const double> costs);
  /// Deals out the batch of the last begin() as the balancer decided. `least_items`: the fewest items of a micro-batch,
  /// unless the batch has fewer.
  [[nodiscard]] std::shared_ptr<BatchPlan> arrange(std::span<const double> costs, balance::StepPlan decided,
                                                   std::int64_t least_items) const;
  /// Learns from a committed step that ran by `plan`. `balancer`: in its present state.
  void record(const BatchPlan& plan, const StepRecord& record, const balance::Balancer& balancer);

  [[nodiscard]] ItemReport report() const;
  /// Lines for explain(): what items cost in time on each device class, and the padding that was saved.
  [[nodiscard]] std::string explain() const;

 private:
  void learn(const BatchPlan& plan, const StepRecord& record);
  void refit(const balance::Balancer& balancer);
  [[nodiscard]] std::int64_t units_of(double cost) const;

  struct Class {
    std::string name;
    ItemShapes shapes;
  };
  struct DeviceState {
    std::size_t device_class = 0;
    plan::ItemShape shape{};  // in units of work
  };

  std::vector<Class> classes_;
  std::vector<DeviceState> devices_;
  std::int64_t micro_batch_;
  bool plain_costs_;
  double unit_ = 0.0;            // units of work per unit of cost, before the first measurement
  std::int64_t batch_size_ = 0;  // of the last begin()
  std::set<std::int64_t> batch_sizes_;
  std::int64_t next_fit_ = 3;  // the number of recorded steps at which the next fit is due
  std::int64_t steps_ = 0;
  ItemPadding padding_;
};

}  // namespace paceline::internal

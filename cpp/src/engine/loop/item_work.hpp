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

namespace paceline::engine {

/// @throws InvalidArgument without costs, and for one that is negative or not finite.
void check_costs(std::span<const double> costs);

/// What batches whose items have costs are to a balancer: work.
///
/// The balancer splits units of work instead of items: the first batch is a million units, however many items it has.
/// Each batch is then arranged so that the devices' work is in proportion to the balancer's shares. How much work a
/// micro-batch is gets learned here (ItemShapes). The units are normalised so that the micro-batches in the window keep
/// their sum: a better shape does not look like devices that changed their speed.
///
/// A batch whose cost lies within a factor of the square root of two from that of an earlier batch size is of that size
/// to the balancer: of the last one if it can be, else of the nearest. So no two sizes are nearer to each other than
/// that, and whatever the order of costs, there are at most two sizes for each doubling.
class ItemWork {
 public:
  /// `device_classes`: one per device; those of one class share a shape. `micro_batch`: the most items of one; 0: any.
  /// `plain_costs`: as plan::ArrangementOptions has it.
  ItemWork(const std::vector<std::string>& device_classes, std::int64_t micro_batch, bool plain_costs);

  /// The batch size that the balancer is asked for, in units of work.
  /// Requires: check_costs().
  [[nodiscard]] std::int64_t batch_units(std::span<const double> costs) const;
  /// Notes that a batch has these costs. Returns batch_units().
  std::int64_t begin(std::span<const double> costs);
  /// The batch of the last begin(), dealt out as the balancer decided. `least_items`: of a micro-batch, unless the
  /// batch has fewer.
  [[nodiscard]] std::shared_ptr<BatchPlan> arrange(std::span<const double> costs, balance::StepPlan decided,
                                                   std::int64_t least_items) const;
  /// A step that ran by `plan` and was committed; what the balancer knows by now.
  void record(const BatchPlan& plan, const StepRecord& record, const balance::Balancer& balancer);

  [[nodiscard]] ItemReport report() const;
  /// Some lines for explain(): of each device class what its items cost in time, and what padding was saved.
  [[nodiscard]] std::string explain() const;

 private:
  void learn(const BatchPlan& plan, const StepRecord& record);
  void refit(const balance::Balancer& balancer);
  [[nodiscard]] std::int64_t units_of(double cost) const;
  [[nodiscard]] std::string describe(std::size_t device_class) const;

  std::vector<std::size_t> class_of_;
  std::vector<std::string> class_names_;
  std::vector<ItemShapes> classes_;
  std::vector<plan::ItemShape> shapes_;  // per device, in units of work
  std::int64_t micro_batch_;
  bool plain_costs_;
  double unit_ = 0.0;            // units of work for one of cost, before anything was measured
  std::int64_t batch_size_ = 0;  // what the balancer was asked for last
  std::set<std::int64_t> batch_sizes_;
  std::int64_t next_fit_ = 3;  // steps recorded until then
  std::int64_t steps_ = 0;
  ItemPadding padding_;
};

}  // namespace paceline::engine

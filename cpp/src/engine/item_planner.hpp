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
#include <paceline/engine/item_plan.hpp>
#include <paceline/engine/step.hpp>

#include "engine/item_shapes.hpp"

namespace paceline::engine {

/// @throws InvalidArgument without costs, and for one that is negative or not finite.
void check_costs(std::span<const double> costs);

/// The closed loop for batches whose items have costs.
///
/// The balancer decides as it always does, only that what it splits are units of work instead of items: a batch is a
/// million of them, however many items it has. So gates, hysteresis, fixed ratios and taking back hold as they are.
/// Each batch is then arranged so that the devices' work is in proportion to the balancer's shares. What a micro-batch
/// is in units of work is learned here (ItemShapes) and normalised so that all micro-batches in the window keep their
/// sum: a better shape does not look like devices that changed their speed.
///
/// A batch whose cost lies within a factor of the square root of two from that of an earlier batch size is of that size
/// to the balancer: of the last one if it can be, else of the nearest. So no two sizes are nearer to each other than
/// that, and in whatever order costs come there are two for each doubling of them at most.
class ItemPlanner {
 public:
  /// `device_classes`: one per device; those of one class share a shape.
  ItemPlanner(balance::Balancer balancer, const std::vector<std::string>& device_classes, std::int64_t micro_batch);

  /// What a batch of these costs is to the balancer, in units of work.
  /// Requires: check_costs().
  [[nodiscard]] std::int64_t batch_units(std::span<const double> costs) const;
  /// `least_items`: of a micro-batch, unless the batch has fewer.
  /// @throws InvalidArgument as check_costs(); nothing changes then.
  [[nodiscard]] std::shared_ptr<const ItemPlan> next(std::span<const double> costs, std::int64_t least_items = 1);
  /// A step that ran by `plan` and was committed. `judged`: the balancer shall learn of it too.
  void record(const ItemPlan& plan, const StepRecord& record, bool judged);

  [[nodiscard]] balance::Balancer& balancer() noexcept { return balancer_; }
  [[nodiscard]] const balance::Balancer& balancer() const noexcept { return balancer_; }
  [[nodiscard]] ItemReport report() const;
  /// Some lines for explain(): of each device class what its items cost in time, and what padding was saved.
  [[nodiscard]] std::string explain() const;

 private:
  void learn(const ItemPlan& plan, const StepRecord& record);
  void refit();
  [[nodiscard]] std::int64_t units_of(double cost) const;
  [[nodiscard]] std::string told_of(std::size_t device_class) const;

  balance::Balancer balancer_;
  std::vector<std::size_t> class_of_;
  std::vector<std::string> class_names_;
  std::vector<ItemShapes> classes_;
  std::vector<plan::ItemShape> shapes_;  // per device, in units of work
  std::int64_t micro_batch_;
  double unit_ = 0.0;            // units of work for one of cost, before anything was measured
  std::int64_t batch_size_ = 0;  // what the balancer was asked for last
  std::set<std::int64_t> batch_sizes_;
  std::int64_t next_fit_ = 3;  // steps recorded until then
  std::int64_t steps_ = 0;
  ItemPadding padding_;
};

}  // namespace paceline::engine

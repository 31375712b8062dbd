// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/per_device.hpp>
#include <paceline/plan/item_packing.hpp>

namespace paceline::internal {

/// One timed micro-batch of items with costs.
struct ItemTiming {
  DeviceId device{};
  std::int64_t step = 0;
  double count = 0.0;
  double longest = 0.0;
  double sum = 0.0;
  double squares = 0.0;  ///< sum of the squared costs
  double seconds = 0.0;
};

/// What items cost on one class of devices, learned from the times of micro-batches: a shape common to the class.
///
/// Three measures of a micro-batch compete, because only the times can tell whether loss_fn trims a slice to its
/// longest item, packs items without padding, or pads all of them to one length. To replace the present measure another
/// one must reduce the error by a tenth, so that chance does not switch between them. After a change of its speed a
/// device counts as a new device; otherwise the fit would mix up shape and scale.
class ItemShapes {
 public:
  void add(const ItemTiming& timing);
  /// Fits the micro-batches in the window. `since_step`: per device, the first step at its present speed. Returns
  /// false, and changes nothing, if there are too few micro-batches or their times do not depend on the items.
  bool fit(const PerDevice<std::int64_t>& since_step);

  [[nodiscard]] bool fitted() const { return fitted_; }
  [[nodiscard]] const plan::ItemShape& shape() const { return shape_; }  ///< in seconds on the fastest device
  [[nodiscard]] double error() const { return error_; }
  [[nodiscard]] std::int64_t samples() const { return fitted_samples_; }
  [[nodiscard]] const std::deque<ItemTiming>& timings() const { return timings_; }

 private:
  std::deque<ItemTiming> timings_;
  plan::ItemShape shape_;
  double error_ = 0.0;
  std::int64_t fitted_samples_ = 0;
  bool fitted_ = false;
};

/// The work of the micro-batch that was timed.
[[nodiscard]] double work_of(const plan::ItemShape& shape, const ItemTiming& timing);

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
  /// `device_classes`: devices of one class share a shape. `micro_batch`: the most items of a
  /// micro-batch; 0: no limit. `plain_costs`: see plan::ArrangementOptions.
  ItemWork(const PerDevice<std::string>& device_classes, std::int64_t micro_batch, bool plain_costs);

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
  void refit(const balance::Balancer& balancer);

  struct Class {
    std::string name;
    ItemShapes shapes;
  };
  struct DeviceState {
    std::size_t device_class = 0;
    plan::ItemShape shape{};  // in units of work
  };

  std::vector<Class> classes_;
  PerDevice<DeviceState> devices_;
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

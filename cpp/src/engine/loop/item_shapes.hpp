// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/plan/item_packing.hpp>

namespace paceline::internal {

/// One timed micro-batch of items with costs.
struct ItemTiming {
  DeviceId device = 0;
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
  explicit ItemShapes(std::size_t device_count) : device_count_(device_count) {}

  void add(const ItemTiming& timing);
  /// Fits the micro-batches in the window. `since_step`: per device, the first step at its present speed. Returns
  /// false, and changes nothing, if there are too few micro-batches or their times do not depend on the items.
  bool fit(const std::vector<std::int64_t>& since_step);

  [[nodiscard]] bool fitted() const { return fitted_; }
  [[nodiscard]] const plan::ItemShape& shape() const { return shape_; }  ///< in seconds on the fastest device
  [[nodiscard]] double error() const { return error_; }
  [[nodiscard]] std::int64_t samples() const { return fitted_samples_; }
  [[nodiscard]] const std::deque<ItemTiming>& timings() const { return timings_; }

 private:
  std::size_t device_count_;
  std::deque<ItemTiming> timings_;
  plan::ItemShape shape_;
  double error_ = 0.0;
  std::int64_t fitted_samples_ = 0;
  bool fitted_ = false;
};

/// The work of the micro-batch that was timed.
[[nodiscard]] double work_of(const plan::ItemShape& shape, const ItemTiming& timing);

}  // namespace paceline::internal

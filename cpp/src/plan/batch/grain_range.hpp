// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/plan/cost_model.hpp>

#include "plan/batch/monotone.hpp"

namespace paceline::plan {

/// A device's cost for `grains` grains, which are `offset + grains * grain` items, with the start-up that it pays once.
///
/// The values are exactly `(model.seconds(items) + startup_seconds) + reduction_seconds`. All decisions compare these,
/// so that a brute-force search over the models agrees to the last bit.
class GrainCost {
 public:
  GrainCost() = default;
  GrainCost(const CostModel& model, double startup_seconds, std::int64_t grain, std::int64_t offset)
      : fixed_(model.fixed_seconds()),
        per_item_(model.per_item_seconds()),
        startup_(startup_seconds),
        grain_(grain),
        offset_(offset) {}

  /// With a reduction after the work. It shifts all costs alike, and rounds like its sum with the latest one.
  [[nodiscard]] GrainCost then(double reduction_seconds) const {
    GrainCost cost = *this;
    cost.reduction_ = reduction_seconds;
    return cost;
  }

  [[nodiscard]] std::int64_t items(std::int64_t grains) const { return offset_ + grains * grain_; }
  [[nodiscard]] double seconds(std::int64_t grains) const {
    return ((fixed_ + per_item_ * static_cast<double>(items(grains))) + startup_) + reduction_;
  }

  /// The most grains in [low, high] that finish by `budget`; low - 1 if not even `low` does.
  [[nodiscard]] std::int64_t within(double budget, std::int64_t low, std::int64_t high) const {
    if (!(seconds(low) <= budget)) return low - 1;
    if (seconds(high) <= budget) return high;
    const std::int64_t guess = to_count((budget - intercept()) / slope(), high);
    return last_that_fits(low, high, guess, [&](std::int64_t grains) { return seconds(grains) <= budget; });
  }

  /// seconds(grains) is about intercept() + slope() * grains.
  [[nodiscard]] double intercept() const {
    return fixed_ + startup_ + reduction_ + per_item_ * static_cast<double>(offset_);
  }
  [[nodiscard]] double slope() const { return per_item_ * static_cast<double>(grain_); }

 private:
  double fixed_ = 0.0;
  double per_item_ = 0.0;
  double startup_ = 0.0;
  double reduction_ = 0.0;
  std::int64_t grain_ = 1;
  std::int64_t offset_ = 0;
};

/// The grains that a device may be given, and what they cost. The range is empty if low > high.
struct GrainRange {
  GrainCost cost;
  std::int64_t low = 0;
  std::int64_t high = -1;

  [[nodiscard]] bool empty() const { return low > high; }
};

}  // namespace paceline::plan

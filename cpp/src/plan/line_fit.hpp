// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// A line through measured times by least squares: seconds = fixed + per_item * items, neither below 0. While hardly
/// more than one size was seen all of the time counts per item.
class LineFit {
 public:
  /// `kept`: what earlier times weigh of what they did, each time that one is added.
  explicit LineFit(double kept = 1.0) noexcept : kept_(kept) {}

  void add(double items, double seconds) noexcept {
    for (double* sum : {&weight_, &items_, &seconds_, &squares_, &products_}) *sum *= kept_;
    weight_ += 1.0;
    items_ += items;
    seconds_ += seconds;
    squares_ += items * items;
    products_ += items * seconds;
    ++samples_;
  }
  [[nodiscard]] std::int64_t samples() const noexcept { return samples_; }
  /// Requires: samples of at least one item.
  [[nodiscard]] CostModel model() const {
    const double spread = squares_ * weight_ - items_ * items_;
    double per_item = seconds_ / items_;
    if (spread > 1e-6 * squares_ * weight_) {
      per_item = std::clamp((products_ * weight_ - items_ * seconds_) / spread, 0.0, per_item);
    }
    return CostModel::affine(std::max(0.0, (seconds_ - per_item * items_) / weight_), per_item);
  }

 private:
  double kept_;
  std::int64_t samples_ = 0;
  double weight_ = 0.0;
  double items_ = 0.0;
  double seconds_ = 0.0;
  double squares_ = 0.0;
  double products_ = 0.0;
};

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include <paceline/plan/cost_model.hpp>

namespace paceline::internal {

/// The seconds of a kind of job on a device, as a line in the size of the batch, or in what it costs with its padding:
/// least squares over the last runs, which count less the older they are.
class RunTimes {
 public:
  void add(double n, double seconds) noexcept {
    for (double* sum : {&weight_, &n_, &t_, &nn_, &nt_}) *sum *= kKept;
    weight_ += 1.0;
    n_ += n;
    t_ += seconds;
    nn_ += n * n;
    nt_ += n * seconds;
    ++samples_;
  }
  [[nodiscard]] std::int64_t samples() const noexcept { return samples_; }

  /// Through the origin while hardly more than one size was seen, or where the line would have a negative part.
  [[nodiscard]] plan::CostModel model() const {
    const double spread = nn_ * weight_ - n_ * n_;
    if (spread > 1e-6 * nn_ * weight_) {
      const double slope = (nt_ * weight_ - n_ * t_) / spread;
      const double fixed = (t_ - slope * n_) / weight_;
      if (slope >= 0.0 && fixed >= 0.0) return plan::CostModel::affine(fixed, slope);
      if (slope < 0.0) return plan::CostModel::affine(t_ / weight_, 0.0);
    }
    return plan::CostModel::affine(0.0, nn_ > 0.0 ? nt_ / nn_ : 0.0);
  }

 private:
  static constexpr double kKept = 0.9;  // some ten runs count
  std::int64_t samples_ = 0;
  double weight_ = 0.0;
  double n_ = 0.0;
  double t_ = 0.0;
  double nn_ = 0.0;
  double nt_ = 0.0;
};

}  // namespace paceline::internal

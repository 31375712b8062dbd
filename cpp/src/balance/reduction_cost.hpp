// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace paceline::balance {

/// What the reduction adds to a step, by the number of devices with work.
///
/// For a number of devices that worked it is the median of their last steps. For other numbers it is what the options
/// say, or else a value on the line between the neighbouring numbers that worked. One device alone has nothing to
/// reduce. A line is right for a chain, or for sums one after the other. In a ring the first link costs more than later
/// ones, so there the line is too low for few devices; a move that counts on it is judged by the clock and taken back.
class ReductionCost {
 public:
  /// `given`: seconds by number of devices, as BalancerOptions::reduction_seconds.
  ReductionCost(std::vector<double> given, std::size_t devices);

  /// One step: `working` devices had work, the reduction took `seconds` after compute of `compute_seconds`.
  void record(std::size_t working, double seconds, double compute_seconds);

  /// At index k the seconds for k devices, for k from 0 to all. Empty if they are too small to matter for a split.
  [[nodiscard]] const std::vector<double>& seconds() const { return seconds_; }

 private:
  void estimate(double compute_seconds);

  std::vector<double> given_;
  std::vector<std::vector<double>> measured_;
  std::vector<double> seconds_;
};

}  // namespace paceline::balance

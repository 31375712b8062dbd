// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

namespace paceline::balance {

/// What the reduction adds to a step, by the number of devices with work.
///
/// Measured: the median of the last steps with so many devices. Where so many never worked: as told, if told; else on
/// the line between the neighbouring numbers that did, and one device alone has nothing to reduce. A line is what a
/// chain or a sum in turn costs; a ring's first link is dearer than its later ones, so for it the line is too cheap for
/// few devices, and a move that counts on this is judged by the clock and taken back.
class ReductionCost {
 public:
  ReductionCost(std::vector<double> told, std::size_t devices);

  /// One step: `working` devices had work, the reduction took `seconds` after compute of `compute_seconds`.
  void record(std::size_t working, double seconds, double compute_seconds);

  /// At index k the seconds for k devices, for k from 0 to all; empty where it is free, or not worth a split.
  [[nodiscard]] const std::vector<double>& seconds() const { return seconds_; }

 private:
  void estimate(double compute_seconds);

  std::vector<double> told_;
  std::vector<std::deque<double>> measured_;
  std::vector<double> seconds_;
};

}  // namespace paceline::balance

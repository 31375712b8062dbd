// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "balance/shape.hpp"

namespace paceline::balance {

/// One device's scale as measured.
struct Measured {
  std::size_t device = 0;
  double scale = 0.0;
  double error = 0.0;                   ///< relative standard error
  double centre_items = 0.0;            ///< where it was measured: comparing two sizes needs the shape
  std::optional<std::size_t> before{};  ///< number of the group that it was in, at the speed that it still has
};

/// Devices that cannot be told apart, and their common scale.
struct Cluster {
  std::vector<std::size_t> members;
  double scale = 0.0;
  double log_scale = 0.0;
  double error = 0.0;
  double centre_items = 0.0;
  std::optional<std::size_t> before{};  ///< of all members, where it is the same
};

/// Groups devices of one class. Two groups are one until their scales differ by 3 standard errors and 1 %. Groups that
/// were apart stay apart until the difference is below 2 standard errors. Otherwise a difference near the bound would
/// change shares with every step (on a noisy host there were 6 moves in 100 steps to and fro).
///
/// The clustering is agglomerative, in units of that bound: of neighbours in scale the closest pair first. The common
/// scale is a mean weighted by inverse variance. O(n^2), if groups of equal devices are few.
[[nodiscard]] std::vector<Cluster> cluster_equals(const std::vector<Measured>& devices, const ShapeEstimator& shape);

}  // namespace paceline::balance

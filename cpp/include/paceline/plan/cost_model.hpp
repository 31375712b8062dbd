// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::plan {

/// One measured or assumed point of a cost table: `items` items take `seconds`.
struct CostPoint {
  std::int64_t items = 0;
  double seconds = 0.0;
  friend bool operator==(const CostPoint&, const CostPoint&) = default;
};

/// Seconds a device needs for a share of n items: affine, or a nondecreasing table with linear pieces.
///
/// Affine: seconds(n) = fixed + per_item * n. Table: linear between points, the first segment's line (never
/// below zero) before the first point, the last segment's slope after the last. Both are nondecreasing in n,
/// rounding included, which is all that split_batch needs to be exact. A value type; safe to share between threads.
class PACELINE_API CostModel {
 public:
  /// The free device: zero seconds for any share.
  CostModel() = default;

  /// @throws InvalidArgument if a coefficient is negative or not finite.
  [[nodiscard]] static CostModel affine(double fixed_seconds, double per_item_seconds);

  /// `points` in strictly increasing `items` with nondecreasing `seconds`; one point means proportional.
  /// @throws InvalidArgument naming the first point that breaks the order.
  [[nodiscard]] static CostModel table(std::span<const CostPoint> points);

  /// Seconds for `items` items, items >= 0. O(1) affine, O(log points) for a table.
  [[nodiscard]] double seconds(std::int64_t items) const noexcept;

  /// The largest n in [0, limit] with seconds(n) <= budget; -1 if even n = 0 does not fit.
  [[nodiscard]] std::int64_t items_within(double budget_seconds, std::int64_t limit) const noexcept;

  /// The same shape on a device `factor` times slower.
  [[nodiscard]] CostModel scaled(double factor) const;

  [[nodiscard]] bool is_affine() const noexcept { return points_.empty(); }
  /// Seconds that do not depend on the size: the affine constant, or the table's value at n = 0.
  [[nodiscard]] double fixed_seconds() const noexcept { return fixed_seconds_; }
  /// Seconds each further item costs: the affine slope, or the table's mean slope over its range.
  [[nodiscard]] double per_item_seconds() const noexcept { return per_item_seconds_; }
  [[nodiscard]] const std::vector<CostPoint>& points() const noexcept { return points_; }

  friend bool operator==(const CostModel&, const CostModel&) = default;

 private:
  double fixed_seconds_ = 0.0;  // of a table: derived from the points, kept so that reading it costs nothing
  double per_item_seconds_ = 0.0;
  std::vector<CostPoint> points_;
};

}  // namespace paceline::plan

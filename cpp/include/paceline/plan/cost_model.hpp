// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/export.hpp>

namespace paceline::plan {

/// The seconds that a device needs for a share of n items: fixed + per_item * n. It never decreases with n, even after
/// rounding; split_batch needs no more than that to be exact. A value type; safe to share between threads.
class PACELINE_API CostModel {
 public:
  /// A device that takes no time for any share.
  CostModel() = default;

  /// @throws InvalidArgument if a coefficient is negative or not finite.
  [[nodiscard]] static CostModel affine(double fixed_seconds, double per_item_seconds);

  /// Seconds for `items` items, items >= 0.
  [[nodiscard]] double seconds(std::int64_t items) const noexcept;

  /// The largest n in [0, limit] with seconds(n) <= budget; -1 if even n = 0 does not fit.
  [[nodiscard]] std::int64_t items_within(double budget_seconds, std::int64_t limit) const noexcept;

  /// The same shape on a device `factor` times slower.
  [[nodiscard]] CostModel scaled(double factor) const;

  /// Seconds that do not depend on the size.
  [[nodiscard]] double fixed_seconds() const noexcept { return fixed_seconds_; }
  /// Seconds each further item costs.
  [[nodiscard]] double per_item_seconds() const noexcept { return per_item_seconds_; }

  friend bool operator==(const CostModel&, const CostModel&) = default;

 private:
  double fixed_seconds_ = 0.0;
  double per_item_seconds_ = 0.0;
};

}  // namespace paceline::plan

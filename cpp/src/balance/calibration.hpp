// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "balance/policy.hpp"

namespace paceline::balance {

/// Plans the first steps with shares off the even split, so that the shape of t(n) can be learned.
///
/// With one size, the constant part of a time and the part per item cannot be told apart, and the first real move would
/// be an extrapolation. If k of N devices get sizes that differ by D, this costs about D k / (N - k) of one step,
/// because the others' surplus is waited for, and its information is N k D^2 / (N - k). So information per loss grows
/// with D and does not depend on k. Therefore few devices get much less, a quarter of an even share, and the others get
/// at most a third more, because memory may be tight. There are two such steps, since the first step of a process is
/// often odd. The even split follows for comparison. There is no calibration if limits forbid it or the batch is too
/// small. It ends early if several micro-batch sizes in a step tell the two parts apart.
class Calibration {
 public:
  explicit Calibration(bool wanted) : done_(!wanted) {}

  /// The off-even shares for this step, or none. `even` is the split they are derived from.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> shares(const PolicyContext& context,
                                                                const std::vector<std::int64_t>& even) const;
  /// After a step planned by shares().
  void observe(const PolicyContext& context);

  [[nodiscard]] bool done() const { return done_; }

 private:
  bool done_;
  int informative_steps_ = 0;
  int steps_ = 0;
};

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "balance/policy.hpp"

namespace paceline::balance {

/// First steps with shares off the even split, so that the shape of t(n) can be learned.
///
/// With one size seen, the constant part and the part per item cannot be told apart, and the first real move would
/// extrapolate blindly. A contrast of D in the size of k of N devices costs about D k / (N - k) of one step (the
/// others' surplus is what is waited for) and informs with N k D^2 / (N - k): per loss the information grows with D
/// whatever k is. So few devices go far down, to a quarter, rather than many a little; the others go up by at most a
/// third, since memory may be tight. Two steps, because the first one of a process is often odd. The counterpart is the
/// even split afterwards. Not done where limits forbid it or the batch is too small, and ended as soon as timings tell
/// the parts apart by themselves (several micro-batch sizes per step).
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

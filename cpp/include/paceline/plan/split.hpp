// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// The limits of one device's share. A share is zero (if it may be), or at least 1 and in [minimum, maximum].
struct ShareLimits {
  std::int64_t minimum = 0;           ///< smallest share that is not zero
  std::int64_t maximum = kUnlimited;  ///< e.g. what fits in its memory
  bool may_be_zero = true;            ///< false: the device takes part whatever it costs
  double startup_seconds = 0.0;       ///< paid once per step if the share is not zero

  static constexpr std::int64_t kUnlimited = INT64_MAX;
};

struct SplitOptions {
  // `= {}` keeps designated initialisers free of -Wmissing-field-initializers.
  /// One per device, or empty for no limits.
  std::vector<ShareLimits> limits = {};
  /// Shares are multiples of it. When the batch is not, exactly one share carries the remainder.
  std::int64_t granularity = 1;
  /// The seconds of the reduction if k devices have work, at index k (index 0 is not used). They are added to the
  /// makespan. Empty: 0. Nondecreasing is usual but not required.
  std::vector<double> reduction_seconds = {};
  /// The present shares, or empty. Among optimal splits the one that changes the fewest devices wins.
  std::vector<std::int64_t> previous = {};
};

struct Split {
  std::vector<std::int64_t> shares;  ///< per device; they sum to the batch
  double makespan_seconds = 0.0;     ///< when the last device finishes, by the models
};

/// The exact integer minimum makespan of `batch_size` items over `models.size()` devices.
///
/// A device with a share n > 0 takes `models[i].seconds(n) + startup_seconds`; a device without a share takes 0. The
/// makespan is the longest of these plus `reduction_seconds[number of devices with work]`. No split that respects the
/// limits has a smaller makespan. The doubles are compared as they are, without tolerance. Fixed and start-up costs are
/// included: a device whose first item costs more than it gains gets nothing. So all devices never lose to a subset of
/// them, unless a minimum or may_be_zero = false forces it.
///
/// Among splits of equal makespan the winner is, in this order:
///  1. the one that changes the fewest devices from `previous`, if given;
///  2. the one with the preferred role at the lowest-numbered device where two splits differ: the share with the
///     remainder, then other work, then no work, then its previous share (so lower-numbered devices work and change);
///  3. the one that hands out the grains beyond the minimums one by one, each to the device that would finish it first,
///     on a tie to the lower-numbered one: no device works longer than necessary.
///
/// The result is exact for any number of devices if each may take any number of grains from zero, or from its minimum
/// if it must take part, to its maximum. A device that may be zero, with a minimum above one grain, has a gap. Then
/// subsets of the devices are searched. Up to 8 devices all subsets are. Beyond 8 the search gives up a candidate
/// makespan after 65,536 steps. The split is then feasible, and no worse than the first one found, which starts as many
/// devices as their minimums allow, lowest first; "infeasible" may mean "not found". Rules 1 and 2 are cut off in the
/// same way beyond 8 devices. Beyond 16 devices with reduction_seconds, `previous` counts only if it is optimal as a
/// whole.
///
/// A batch of 0 gives zeros and 0 seconds, unless a device must take part. Pure; O(devices) without
/// gaps, remainder, reductions or `previous`, about a microsecond for 8 devices.
///
/// Source of the greedy rule: Ibaraki & Katoh, Resource Allocation Problems, MIT Press 1988.
///
/// @throws InvalidArgument for sizes that do not match, negative or not finite numbers, and for limits that no split
/// respects, naming the constraint.
PACELINE_API Split split_batch(std::int64_t batch_size, std::span<const CostModel> models,
                               const SplitOptions& options = {});

/// Shares proportional to the user's `weights` (>= 0, not all zero), rounded by largest remainder, on a tie to the
/// lower index. A device of weight zero gets nothing.
PACELINE_API std::vector<std::int64_t> split_weighted(std::int64_t batch_size, std::span<const double> weights);

/// Shares that differ by at most one item, the larger ones first.
PACELINE_API std::vector<std::int64_t> split_even(std::int64_t batch_size, std::int64_t device_count);

}  // namespace paceline::plan

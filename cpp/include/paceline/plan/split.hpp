// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// What one device's share must respect. A share is zero (where it may be), or at least 1 and in [minimum, maximum].
struct ShareLimits {
  std::int64_t minimum = 0;           ///< smallest share that is not zero
  std::int64_t maximum = kUnlimited;  ///< e.g. what fits in its memory
  bool may_be_zero = true;            ///< false: the device takes part whatever it costs
  double startup_seconds = 0.0;       ///< paid once a step, only when the share is not zero

  static constexpr std::int64_t kUnlimited = INT64_MAX;
};

struct SplitOptions {
  // `= {}` keeps designated initialisers free of -Wmissing-field-initializers.
  /// One per device, or empty for no limits.
  std::vector<ShareLimits> limits = {};
  /// Shares are multiples of it. When the batch is not, exactly one share carries the remainder.
  std::int64_t granularity = 1;
  /// Seconds the step ends later when k devices have work, at index k (index 0 unused): the reduction.
  /// Empty: free. Nondecreasing is usual but not required.
  std::vector<double> reduction_seconds = {};
  /// The shares now in force, or empty: among optimal splits the one that changes fewest devices wins.
  std::vector<std::int64_t> previous = {};
};

struct Split {
  std::vector<std::int64_t> shares;  ///< per device; they sum to the batch
  double makespan_seconds = 0.0;     ///< when the last device finishes, by the models
};

/// The exact integer minimum makespan of `batch_size` items over `models.size()` devices.
///
/// A device with a share n > 0 takes `models[i].seconds(n) + startup_seconds`, one without takes none; the makespan is
/// the longest of these plus `reduction_seconds[number of devices with work]`. No split that respects the limits has a
/// smaller one: these doubles are compared as they are, no tolerance anywhere. Fixed and start-up costs are inside: a
/// device whose first item costs more than it brings gets nothing, so more devices never lose to the best subset of
/// them (a minimum or may_be_zero = false aside, which say otherwise).
///
/// Among splits of equal makespan the winner is, in this order:
///  1. the one that changes the fewest devices from `previous`, where given;
///  2. at the lowest-numbered device where two differ in what it does: having the remainder, before other work, before
///  idling,
///     before keeping its previous share (so that lower-numbered devices work, and are the ones that change);
///  3. the one that hands out the grains left after the minimums one by one, each to the device that would finish it
///     first, on a tie to the lower-numbered one: no device works longer than it must.
///
/// Exact for any number of devices where each may take any size from zero or its minimum (if it must take part) to its
/// maximum, in whole grains. A minimum above one grain on a device that may be zero leaves a gap: then subsets of
/// devices are searched, all of them up to 8 devices. Beyond 8 the search gives up a candidate makespan after 65,536
/// steps: the split is feasible and no worse than the first one found, which starts as many devices as their minimums
/// allow, lowest first; and infeasible may then mean not found. Beyond 8 devices rule 1 and 2 are cut off likewise;
/// beyond 16 with reduction_seconds `previous` counts only when it is optimal as a whole.
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

/// The user's own ratios: shares proportional to `weights` (>= 0, not all zero), by largest remainder, on a tie the
/// lower index. A device of weight zero gets nothing.
PACELINE_API std::vector<std::int64_t> split_weighted(std::int64_t batch_size, std::span<const double> weights);

/// Shares that differ by at most one item, the larger ones first.
PACELINE_API std::vector<std::int64_t> split_even(std::int64_t batch_size, std::int64_t device_count);

}  // namespace paceline::plan

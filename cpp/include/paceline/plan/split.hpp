// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// What one device's share must respect. A share is zero, or in [minimum, maximum].
struct ShareLimits {
  std::int64_t minimum = 0;             ///< smallest share that is not zero
  std::int64_t maximum = kUnlimited;    ///< e.g. what fits in its memory
  bool may_be_zero = true;              ///< false: the device takes part whatever it costs
  double startup_seconds = 0.0;         ///< paid once a step, only when the share is not zero

  static constexpr std::int64_t kUnlimited = INT64_MAX;
};

struct SplitOptions {
  /// One per device, or empty for no limits.
  std::vector<ShareLimits> limits;
  /// Shares are multiples of it. When the batch is not, exactly one share carries the remainder.
  std::int64_t granularity = 1;
  /// Seconds the step ends later when k devices have work, at index k (index 0 unused): the reduction.
  /// Empty: free. Nondecreasing is usual but not required.
  std::vector<double> reduction_seconds;
  /// The shares now in force, or empty: among optimal splits the one that changes fewest devices wins.
  std::vector<std::int64_t> previous;
};

struct Split {
  std::vector<std::int64_t> shares;   ///< per device; they sum to the batch
  double makespan_seconds = 0.0;      ///< when the last device finishes, by the models
};

/// The exact integer minimum makespan of `batch_size` items over `models.size()` devices.
PACELINE_API Split split_batch(std::int64_t batch_size, std::span<const CostModel> models,
                               const SplitOptions& options = {});

/// The user's own ratios: shares proportional to `weights` (>= 0, not all zero), by largest remainder.
PACELINE_API std::vector<std::int64_t> split_weighted(std::int64_t batch_size, std::span<const double> weights);

/// Shares that differ by at most one item, the larger ones first.
PACELINE_API std::vector<std::int64_t> split_even(std::int64_t batch_size, std::int64_t device_count);

}  // namespace paceline::plan

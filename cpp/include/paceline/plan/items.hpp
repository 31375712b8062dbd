// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::plan {

/// The seconds that a device needs for items whose costs add up to `load`: fixed + per_cost * load. 0 without items.
struct LoadModel {
  double fixed_seconds = 0.0;
  double seconds_per_cost = 1.0;

  /// With at least one item.
  [[nodiscard]] double seconds(double load) const noexcept { return fixed_seconds + seconds_per_cost * load; }
  friend bool operator==(const LoadModel&, const LoadModel&) = default;
};

/// Steps of real devices vary by 0.5 % and more: a fiftieth of that cannot be seen.
inline constexpr double kItemTolerance = 1e-4;

struct ItemSplit {
  std::vector<std::vector<std::int64_t>> items;  ///< per device, indices into the costs, ascending
  std::vector<double> loads;                     ///< per device, the sum of its items' costs; padded: count * largest
  double makespan_seconds = 0.0;                 ///< when the last device finishes, by the models
  double lower_bound_seconds = 0.0;  ///< no split has a smaller makespan, except by rounding; equal if proven best
  /// (makespan - bound) / bound; 0 where both are 0.
  [[nodiscard]] double gap() const noexcept {
    return lower_bound_seconds > 0.0 ? makespan_seconds / lower_bound_seconds - 1.0 : 0.0;
  }
};

/// Splits items that do not cost the same (tokens, squared lengths, a user's function) over devices of unequal speed,
/// so that the last device finishes as early as possible. Every item goes to exactly one device. A device may get none.
///
/// 1. Longest processing time: the items, by descending cost, each go to the device that would finish them first
///    (Graham, SIAM Journal on Applied Mathematics 17(2), 1969; for unequal speeds Gonzalez, Ibarra & Sahni, SIAM
///    Journal on Computing 6(1), 1977).
/// 2. Pairwise interchange: the latest device gives an item away or swaps one. Each time the exchange is made that
/// lowers
///    the later of the two finishes most (Fatemi Ghomi & Jolai Ghazvini, Production Planning & Control 9(7), 1998).
///    This ends when the makespan is within `tolerance` of the lower bound, or when no exchange helps.
/// 3. Up to 16 items: a depth-first search in the order of the complete greedy algorithm (Korf, Artificial Intelligence
///    106(2), 1998), with at most 2^14 placements. It mostly finds the optimum, and the gap shows whether that is
///    proven.
///
/// The lower bound is the larger of two. The first holds for each j: the time in which the j fastest devices can run
/// the j largest items. The second counts how many items above a size fit side by side.
///
/// Deterministic: no clock and no random numbers, and ties go to the lower index of item and device. Multiplying all
/// costs or all seconds by a power of two gives the same items. The result is never worse than longest processing time.
/// Pure. O(items * (devices + log items)), and at most as many exchanges as items, each O(items).
///
/// @throws InvalidArgument if there is no device, or a number is negative or not finite.
PACELINE_API ItemSplit split_items(std::span<const double> costs, std::span<const LoadModel> models,
                                   double tolerance = kItemTolerance);

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::plan {

/// Seconds a device needs for items whose costs add up to `load`: fixed + per_cost * load, and nothing without items.
struct LoadModel {
  double fixed_seconds = 0.0;
  double seconds_per_cost = 1.0;
  friend bool operator==(const LoadModel&, const LoadModel&) = default;
};

/// Steps of real devices vary by 0.5 % and more: a fiftieth of that cannot be seen.
inline constexpr double kItemTolerance = 1e-4;

struct ItemSplit {
  std::vector<std::vector<std::int64_t>> items;  ///< per device, indices into the costs, ascending
  std::vector<double> loads;                     ///< per device, the sum of its items' costs; padded, count * largest
  double makespan_seconds = 0.0;                 ///< when the last device finishes, by the models
  double lower_bound_seconds = 0.0;  ///< no split has a smaller makespan, rounding aside; equal to it when proven best
  /// (makespan - bound) / bound; 0 where both are 0.
  [[nodiscard]] double gap() const noexcept {
    return lower_bound_seconds > 0.0 ? makespan_seconds / lower_bound_seconds - 1.0 : 0.0;
  }
};

/// Splits items that do not cost the same (tokens, squared lengths, a user's function) over devices of unequal speed,
/// so that the last device finishes as early as possible. Every item goes to exactly one device; a device may get none.
///
/// Items in descending cost each go to the device that would finish them first: longest processing time (Graham, SIAM
/// Journal on Applied Mathematics 17(2), 1969) in its form for unequal speeds (Gonzalez, Ibarra & Sahni, SIAM Journal
/// on Computing 6(1), 1977). Then the latest device gives an item away or swaps one, whatever lowers the later of the
/// two finishes most, while that helps (pairwise interchange: Fatemi Ghomi & Jolai Ghazvini, Production Planning &
/// Control 9(7), 1998). That ends once the makespan is within `tolerance` of the lower bound; 0 goes on until nothing
/// helps. Up to 16 items a depth-first search in the order of the complete greedy algorithm (Korf, Artificial
/// Intelligence 106(2), 1998) looks for something better, with at most 2^14 placements: mostly it finds the optimum,
/// and the gap shows whether that is proven.
///
/// The bound is the larger of: the j largest costs over what the j devices that do most do by then, for each j; and as
/// many items of at least one size as fit side by side.
///
/// Deterministic: no clock, no random numbers; ties go to the lower index of item and device. Costs, or seconds, times
/// a power of two give the same items. Never worse than longest processing time. Pure. O(items * (devices + log items))
/// and at most as many exchanges as items, each O(items).
///
/// @throws InvalidArgument without devices, and for numbers that are negative or not finite.
PACELINE_API ItemSplit split_items(std::span<const double> costs, std::span<const LoadModel> models,
                                   double tolerance = kItemTolerance);

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
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

/// The most that one device may be given. Sums are compared with 1e-12 of slack, so that 0.1 + 0.2 fits into 0.3.
struct ItemCaps {
  static constexpr std::int64_t kAnyCount = std::numeric_limits<std::int64_t>::max();
  static constexpr double kAnySum = std::numeric_limits<double>::infinity();
  std::int64_t items = kAnyCount;
  double cost = kAnySum;    ///< on the sum of its items' costs, e.g. tokens
  double memory = kAnySum;  ///< on the sum of its items' ItemOptions::memory
  friend bool operator==(const ItemCaps&, const ItemCaps&) = default;
};

struct ItemOptions {
  /// One per device, or empty for no caps.
  std::vector<ItemCaps> caps = {};
  /// What each item takes of its device's memory, in any unit; one per item, or empty.
  std::vector<double> memory = {};
  /// The search ends once the makespan is within this part of the lower bound. Steps of real devices vary by 0.5 % and
  /// more: a fiftieth of that cannot be seen. 0 searches on until nothing helps.
  double tolerance = 1e-4;
  /// The most placements that the search beyond exchanges may try, each some 30 to 80 ns. Only few items a device need
  /// it.
  std::int64_t search_steps = 1 << 14;
};

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
/// so that the last device finishes as early as possible, within caps. Every item goes to exactly one device; a device
/// may get none.
///
/// Items in descending cost each go to the device that would finish them first: longest processing time (Graham, SIAM
/// Journal on Applied Mathematics 17(2), 1969) in its form for unequal speeds (Gonzalez, Ibarra & Sahni, SIAM Journal
/// on Computing 6(1), 1977). Then the latest device gives an item away or swaps one, whatever lowers the later of the
/// two finishes most, while that helps (pairwise interchange: Fatemi Ghomi & Jolai Ghazvini, Production Planning &
/// Control 9(7), 1998). Where it no longer does, the items of the latest device and one or two others are split anew by
/// a depth-first search of bounded size, in the order of the complete greedy algorithm (Korf, Artificial Intelligence
/// 106(2), 1998). Up to 12 items on up to 8 devices that search runs over everything: with no tolerance and enough
/// steps the result is the optimum. 2^18 of them, some twenty milliseconds, suffice but for a dozen nearly equal items
/// on more than four unequal devices. Where they do not suffice for the proof, the gap shows it.
///
/// The bound is the largest of: all costs over what all devices do by then, the j largest over the j devices that do
/// most, and as many items of at least one size as fit side by side. Caps on cost and count are inside, a cap on memory
/// only as far as single items have no room.
///
/// Deterministic: no clock, no random numbers; ties go to the lower index of item and device. Costs, or seconds, times
/// a power of two give the same items. Never worse than longest processing time, where that respects the caps. Pure.
/// O(items * devices) and a part that grows with the search, bounded by fixed numbers of steps.
///
/// Finding any split within caps on sums is bin packing. Above 12 items several orders and the bounded search are
/// tried; what they do not find is reported as not found.
///
/// @throws InvalidArgument for sizes that do not match, numbers that are negative or not finite, and for caps that no
/// split respects or for which none was found, naming the cap, the number it must reach, and what can be raised.
PACELINE_API ItemSplit split_items(std::span<const double> costs, std::span<const LoadModel> models,
                                   const ItemOptions& options = {});

}  // namespace paceline::plan

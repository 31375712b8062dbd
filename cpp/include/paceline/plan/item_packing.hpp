// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/item_cost.hpp>

namespace paceline::plan {

/// The measure of a micro-batch that its time is proportional to.
enum class ItemMeasure : std::uint8_t {
  padded,  ///< the number of its items times the longest item's cost: items are padded to the longest
  sum,     ///< the sum of its items' costs: nothing is padded
  count,   ///< the number of its items: every item is padded to one length, or the costs say nothing
};

/// Seconds, or any unit of work, of a micro-batch of items with lengths.
struct ItemShape {
  ItemCost cost;
  ItemMeasure measure = ItemMeasure::padded;

  /// The time that an item of this length adds to a micro-batch whose longest item has this length.
  [[nodiscard]] double item(double length) const noexcept {
    return measure == ItemMeasure::count ? cost.per_token_seconds : cost.item_seconds(length);
  }
  /// A micro-batch of these items; 0 without items. O(items) for sums, else O(1) past finding the longest.
  [[nodiscard]] PACELINE_API double micro_batch(std::span<const double> lengths) const noexcept;
};

struct PackOptions {
  /// The most items of one micro-batch.
  std::int64_t max_items = std::numeric_limits<std::int64_t>::max();
  /// The fewest items of one micro-batch, unless there are fewer items in all. If this is more than half of max_items,
  /// micro-batches may have up to 2 * min_items - 1 items.
  std::int64_t min_items = 1;
  /// The least fixed time of a micro-batch, as a part of all items' time, whatever the shape says. A fit may say by
  /// chance that a micro-batch has no fixed time, and then every length would get a micro-batch of its own. The default
  /// allows some 20 micro-batches.
  double least_fixed = 0.002;
};

/// Cuts items, sorted by descending length, into micro-batches of neighbours, so that together they take the least
/// time.
///
/// If items are padded to the longest of their micro-batch, few micro-batches pad much, and many cost much fixed time.
/// The result has the least sum of both. Contiguous pieces of the sorted items suffice, because exchanging items so
/// that the longer ones share a micro-batch never pads more. The algorithm is dynamic programming over the cuts. The
/// time of a piece is concave Monge (F. F. Yao, STOC 1980), so the best previous cut only moves forward (Galil & Park,
/// Theoretical Computer Science 92(1), 1992): O(items log items).
///
/// If nothing is padded, the pieces are equal: as few as max_items allows, but up to four if they cost less than 1 % of
/// the time, because other devices can take over only what is not started yet.
///
/// @return bounds b_0 = 0 < b_1 < ... < b_m = items; micro-batch k is [b_k, b_k+1). Without items only b_0. Pure.
/// @throws InvalidArgument if lengths are negative, not finite or not descending, or max_items or min_items is below 1.
PACELINE_API std::vector<std::int64_t> pack_items(std::span<const double> lengths_descending, const ItemShape& shape,
                                                  const PackOptions& options = {});

}  // namespace paceline::plan

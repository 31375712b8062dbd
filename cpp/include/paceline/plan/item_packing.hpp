// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/item_cost.hpp>

namespace paceline::plan {

/// What the time of a micro-batch follows.
enum class ItemMeasure : std::uint8_t {
  padded,  ///< its count times the cost of its longest item: items are padded to that
  sum,     ///< the sum of its items' costs: nothing is padded
  count,   ///< its count alone: every item is padded to one length, or the costs say nothing
};

/// Seconds, or any unit of work, of a micro-batch of items with lengths.
struct ItemShape {
  ItemCost cost;
  ItemMeasure measure = ItemMeasure::padded;

  /// What an item of this length adds, in a micro-batch whose longest item has this length.
  [[nodiscard]] double item(double length) const noexcept {
    return measure == ItemMeasure::count ? cost.per_token_seconds : cost.item_seconds(length);
  }
  /// A micro-batch of these items; 0 without items. O(items) for sums, else O(1) past finding the longest.
  [[nodiscard]] PACELINE_API double micro_batch(std::span<const double> lengths) const noexcept;
};

struct PackOptions {
  /// The most items of one micro-batch.
  std::int64_t max_items = std::numeric_limits<std::int64_t>::max();
  /// The fewest, unless there are fewer items at all. More than half of max_items: then up to 2 * min_items - 1 are
  /// allowed.
  std::int64_t min_items = 1;
  /// Micro-batches cost at least this part of all items' time each, whatever the shape says: one that costs nothing
  /// would make every length a micro-batch of its own, and a fit may say so by chance. A fiftieth of what padding can
  /// cost: at most some 20 micro-batches.
  double least_fixed = 0.002;
};

/// Cuts items, sorted by descending length, into micro-batches of neighbours, so that the whole takes least time.
///
/// Where items are padded to the longest of their micro-batch, few micro-batches pad much and many cost much fixed
/// time; no other cut has a smaller sum of both. Contiguous pieces of the sorted items suffice for that: exchanging
/// items so that the longer ones share a micro-batch never pads more. Dynamic programming over the cuts; the time of a
/// piece is concave Monge (F. F. Yao, STOC 1980), so that the best previous cut moves one way only (Galil & Park,
/// Theoretical Computer Science 92(1), 1992): O(items log items). Where nothing is padded, equal pieces: as few as
/// max_items allows, and up to four while they cost less than 1 % of the time, because what is not started yet another
/// device can take over.
///
/// @return bounds b_0 = 0 < b_1 < ... < b_m = items; micro-batch k is [b_k, b_k+1). Only 0 without items. Pure.
/// @throws InvalidArgument for lengths that are negative, not finite or not descending, and for max_items or
/// min_items below 1.
PACELINE_API std::vector<std::int64_t> pack_items(std::span<const double> lengths_descending, const ItemShape& shape,
                                                  const PackOptions& options = {});

}  // namespace paceline::plan

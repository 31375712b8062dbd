// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/item_packing.hpp>

namespace paceline::plan {

/// Which device runs which items of a batch, in which micro-batches and in which order.
struct ItemArrangement {
  std::vector<std::int64_t> order;   ///< all items: device 0's, device 1's, ...; each device's by descending cost
  std::vector<std::int64_t> bounds;  ///< micro-batch k is order[bounds[k]] to order[bounds[k + 1] - 1]
  std::vector<std::size_t> first;    ///< device d runs micro-batches first[d] to first[d + 1] - 1
  std::vector<double> work;          ///< per device, the sum of its micro-batches by its shape
};

struct ArrangeOptions {
  std::int64_t max_items = std::numeric_limits<std::int64_t>::max();  ///< of one micro-batch
  std::int64_t min_items = 1;  ///< of one micro-batch, see PackOptions; a device that would have fewer items gets none
  /// Deal by the costs alone, for users who give ratios. The shapes then only decide on the micro-batches.
  bool plain_costs = false;
};

/// Deals items that do not cost the same to devices, and packs each device's items into micro-batches. Each device's
/// work, with padding and the fixed costs of its micro-batches, comes out in proportion to its target.
///
/// The work that an item adds depends on its micro-batch. So the function first packs the whole batch, to find what an
/// item of each length costs with its padding. split_items deals by these costs, and each device's items are packed
/// again. If some devices are then later than others, items change hands one by one as long as that helps. What is
/// still uneven corrects the speeds of a second round, and the better of the two rounds is taken.
///
/// A device of target 0 gets nothing. Any other gets at least min_items, if there are enough items. If all costs are 0,
/// all items count the same. Deterministic. Pure.
///
/// @throws InvalidArgument if a cost or target is negative or not finite, all targets are 0, there is not one shape per
/// target, or max_items or min_items is below 1.
PACELINE_API ItemArrangement arrange_items(std::span<const double> costs, std::span<const double> targets,
                                           std::span<const ItemShape> shapes, const ArrangeOptions& options = {});

}  // namespace paceline::plan

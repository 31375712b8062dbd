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
  std::int64_t min_items = 1;  ///< of one, as in PackOptions; a device that has fewer items gets none
  /// Deal by the costs alone, as somebody who asks for ratios means them: the shapes then only decide on micro-batches.
  bool plain_costs = false;
};

/// Deals items that do not cost the same to devices, so that each one's work, padding and fixed costs of its
/// micro-batches included, is in proportion to its target; and packs what a device gets.
///
/// What an item adds depends on the micro-batch it comes to lie in. So the whole batch is packed first, which tells
/// what an item of each length costs with its padding; split_items deals by that; each device's items are packed
/// anew; and where that has made some devices later than others, items change hands one by one until nothing is gained.
/// What is uneven still corrects the speeds of a second round; the better of the two is taken. Devices of target 0 get
/// nothing; any other gets at least min_items, if there are enough. Items that all cost nothing count alike.
/// Deterministic. Pure.
///
/// @throws InvalidArgument for costs or targets that are negative or not finite, targets that are all 0, another
/// number of shapes than targets, and max_items or min_items below 1.
PACELINE_API ItemArrangement arrange_items(std::span<const double> costs, std::span<const double> targets,
                                           std::span<const ItemShape> shapes, const ArrangeOptions& options = {});

}  // namespace paceline::plan

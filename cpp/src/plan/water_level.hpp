// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "lane.hpp"

namespace paceline::plan::detail {

/// Gives every lane its `low`, then the rest of `count` one grain at a time, each to the lane that would finish it
/// first, on a tie to the lower index, never beyond `high`. `grains` receives the result.
///
/// That greedy order minimises the latest finish for any nondecreasing costs (Ibaraki & Katoh, Resource Allocation
/// Problems, 1988). It is not walked through: the level T at which `count` grains fit is found first, by Newton's
/// method on the lines (Bitran & Hax 1981 treat the same relaxation), and what rounding left
/// over is given or taken by exact comparison of the same doubles, so the result is that of the walk, bit for bit.
/// O(lanes); no allocation.
///
/// Requires: sum of low <= count <= sum of high, low <= high, grains.size() == lanes.size().
void fill_to_level(std::span<const BoundedLane> lanes, std::int64_t count, std::span<std::int64_t> grains);

}  // namespace paceline::plan::detail

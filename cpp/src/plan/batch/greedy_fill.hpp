// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "plan/batch/grain_range.hpp"

namespace paceline::plan {

/// Gives every device its `low`, then the rest of `count` one grain at a time, each to the device that would finish it
/// first, on a tie to the lower index, never beyond `high`. `grains` receives the result.
///
/// That greedy order minimises the latest finish for any nondecreasing costs (Ibaraki & Katoh, Resource Allocation
/// Problems, 1988). The function does not give grain by grain. It first finds the time T by which about `count` grains
/// fit, by Newton's method on the counts (Bitran & Hax 1981 treat the relaxation). Then it gives or takes what is left
/// over, by exact comparison of the same doubles. The result is that of the grain-by-grain order to the bit.
/// O(devices); no allocation.
///
/// Requires: sum of low <= count <= sum of high, low <= high, grains.size() == ranges.size().
void fill_greedily(std::span<const GrainRange> ranges, std::int64_t count, std::span<std::int64_t> grains);

}  // namespace paceline::plan

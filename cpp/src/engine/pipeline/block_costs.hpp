// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <paceline/engine/stage_planner.hpp>
#include <paceline/plan/stages.hpp>

namespace paceline::internal {

struct BlockFit {
  std::vector<double> speeds;  ///< of each device; the mean of those that were measured is 1, as is one that was not
};

/// Finds how fast devices are and what blocks cost, from times of blocks on devices: seconds = cost(block, items) /
/// speed(device). Writes the times of `blocks`, and leaves their bytes.
///
/// What the same block took on the same device in micro-batches of one size counts as its median. A device's speed
/// against another one is the median over what both have run, weighted by time, since short times are the least sure.
/// Devices that have no block in common are compared through others. Speeds that differ by less than noise does are
/// equal. A cost is a line in the number of items, fitted by least squares to the median of each size, with both
/// coefficients at least 0. With one size only all of it counts per item.
/// `classes`: a number for each block. Blocks with equal numbers have one cost. Empty: each has its own.
BlockFit fit_costs(std::span<const BlockSample> samples, std::size_t device_count, std::vector<plan::BlockCost>& blocks,
                   std::span<const std::size_t> classes = {});

}  // namespace paceline::internal

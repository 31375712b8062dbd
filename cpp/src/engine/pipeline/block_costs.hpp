// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/plan/stages.hpp>

namespace paceline::internal {

/// How long a block took on a device with micro-batches of one size: the median of a step.
struct BlockSample {
  std::size_t block = 0;
  DeviceId device = 0;
  bool backward = false;
  std::int64_t items = 0;
  double seconds = 0.0;
};

struct BlockFit {
  std::vector<double> speeds;  ///< of each device; the mean of those that were measured is 1, as is one that was not
};

/// Finds how fast devices are and what blocks cost, from times of blocks on devices: seconds = cost(block, items) /
/// speed(device). Writes the times of `blocks`, and leaves their bytes.
///
/// A device's speed against another one is the median over what both have run, weighted by time, since short times are
/// the least sure. Devices that have no block in common are compared through others. A cost is a line in the number of
/// items, fitted by least squares with both coefficients at least 0. With one size only all of it counts per item.
BlockFit fit_costs(std::span<const BlockSample> samples, std::size_t device_count,
                   std::vector<plan::BlockCost>& blocks);

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/plan/item_packing.hpp>

namespace paceline::plan {

/// One device's items, packed: each micro-batch by descending cost, the micro-batches likewise.
struct PackedDevice {
  std::vector<std::vector<std::int64_t>> micro_batches;
  double work = 0.0;
};

/// Evens out what packing has made of a split: items go, one by one, from the device that is latest to the one that is
/// earliest, while that makes the later of the two earlier.
///
/// An item that is not the longest of its micro-batch weighs there as much as any other, and in the device that takes
/// it as much as the longest of the micro-batch where it fits: so what a move changes is known without packing anew.
/// For items padded to the longest; micro-batches stay, and their longest items. `speeds`: work a second, per device.
void level_items(std::vector<PackedDevice>& devices, std::span<const double> costs, std::span<const ItemShape> shapes,
                 std::span<const double> speeds, const PackOptions& options);

}  // namespace paceline::plan

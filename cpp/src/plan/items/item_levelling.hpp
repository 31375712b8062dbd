// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/plan/item_packing.hpp>

namespace paceline::plan {

/// One device's items, packed: the items of a micro-batch descend in cost, and so do the micro-batches.
struct PackedDevice {
  std::vector<std::vector<std::int64_t>> micro_batches;
  double work = 0.0;
};

/// Evens out a split that packing has made uneven. Items go one by one from the latest device to the earliest one, as
/// long as the later of the two gets earlier.
///
/// This is for items that are padded to the longest. An item that is not the longest of its micro-batch takes as much
/// time as the longest one, there and in the micro-batch that takes it. So the effect of a move is known without
/// packing anew. Micro-batches and their longest items stay. `speeds`: work per second of each device.
void level_items(std::vector<PackedDevice>& devices, std::span<const double> costs, std::span<const ItemShape> shapes,
                 std::span<const double> speeds, const PackOptions& options);

}  // namespace paceline::plan

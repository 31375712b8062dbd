// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include <paceline/export.hpp>
#include <paceline/plan/items.hpp>

namespace paceline::plan {

/// Splits items over devices that pad their items to the longest one, so that the last device finishes as early as
/// possible. A device with n items, the costliest of cost c, has the load n * c and takes
/// fixed_seconds + seconds_per_cost * n * c. Each device has one micro-batch; arrange_items packs several.
///
/// Every item goes to exactly one device, and every device gets at least one if there are enough. A device's items are
/// neighbours in descending order of cost (on a tie in the given order). No other form of split is faster: exchanging
/// items so that the longer ones lie on one device changes no count and makes no longest item longer. Among devices
/// with the same model the lower index has the longer items.
///
/// The makespan is the exact minimum; the doubles are compared without tolerance. Candidate makespans are bisected,
/// from one time that a device can take to the next. Under a candidate, a device that begins at some item takes as many
/// as fit, because the next device then begins at a shorter item. Only the order of the devices remains to be chosen.
/// Since devices with the same model are alike, this is an order of models: dynamic programming over how many devices
/// of each model have had their turn keeps the most items that these can take. Devices that need not be as late as the
/// makespan are not evened out among each other: with noise of 2 % that would make the last one 0.1 % earlier.
///
/// The result is exact up to 12 devices, and for more devices if there are at most 4096 ways to choose how many of each
/// model (4095 equal devices, or 63 and 63 of two models). Otherwise the models that differ least count as one, and the
/// gap shows what is not proven.
///
/// In the result, loads are the devices' n * c, and lower_bound_seconds is the makespan if that is exact.
/// Deterministic. Pure. O(items) for sorting, and some 30 times O(devices) for equal devices, at worst O(4096 * 12).
///
/// @throws InvalidArgument if there is no device, a number is negative or not finite, or the seconds of all items on
/// one device overflow a double.
PACELINE_API ItemSplit split_padded(std::span<const double> costs, std::span<const LoadModel> models);

}  // namespace paceline::plan

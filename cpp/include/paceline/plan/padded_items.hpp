// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include <paceline/export.hpp>
#include <paceline/plan/items.hpp>

namespace paceline::plan {

/// Splits items over devices that pad what they get to the longest of it, so that the last device finishes as early as
/// possible. A device with n items, the costliest of cost c, has the load n * c and takes
/// fixed_seconds + seconds_per_cost * n * c. One micro-batch a device: arrange_items packs several.
///
/// Every item goes to exactly one device, and every device gets at least one if there are enough. A device's items are
/// neighbours in descending order of cost (on a tie in the order given): exchanging items so that the longer ones lie
/// on one device leaves counts as they are and makes no longest item longer, so that no split of another form is
/// faster. Of devices with the same model the lower index has the longer items.
///
/// The least makespan is found, not approached: these doubles are compared as they are, no tolerance anywhere. Under a
/// bound on the makespan a device that begins at some item takes as many as fit, since the next one then begins at a
/// shorter one; what decides is the order of the devices. Devices with the same model are alike, so the order is one of
/// models: dynamic programming over how many of each model have had their turn keeps the most items that these can
/// take. Bounds are bisected, from one time that a device can take to the next. What lies behind the last device that
/// is as late as the makespan is split anew by itself, and so on: it would be done early in any case, but need not be
/// uneven.
///
/// Exact up to 12 devices, and beyond while there are at most 4096 ways to choose how many of each model: 4095 equal
/// devices, 63 and 63 of two models. For more, models that differ least count as alike, and the gap shows what is not
/// proven.
///
/// In the result, loads are the devices' n * c, and lower_bound_seconds is the makespan where that is exact.
/// Deterministic. Pure. O(items) for sorting, and some 30 times O(devices) for equal devices, at worst O(4096 * 12).
///
/// @throws InvalidArgument without devices, for numbers that are negative or not finite, and for seconds of all items
/// on one device that a double does not hold.
PACELINE_API ItemSplit split_padded(std::span<const double> costs, std::span<const LoadModel> models);

}  // namespace paceline::plan

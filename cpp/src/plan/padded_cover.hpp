// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <paceline/plan/items.hpp>

namespace paceline::plan::detail {

/// Devices with the same model.
struct DeviceKind {
  LoadModel model;
  std::size_t devices = 0;
};

/// Items in descending order of cost, to be cut into one group of neighbours per device.
struct PaddedProblem {
  std::span<const double> cost;   ///< descending
  std::vector<DeviceKind> kinds;  ///< fastest first; no two with the same model
  bool everyone = true;           ///< no device goes without items, of which there are enough
};

/// What one device gets; the next group begins where it ends.
struct PaddedGroup {
  std::size_t kind = 0;
  std::size_t items = 0;
};

struct PaddedCover {
  std::vector<PaddedGroup> groups;  ///< of all devices, the costliest items first
  double makespan_seconds = 0.0;
  bool exact = false;  ///< no other groups, in no other order of the devices, have a smaller makespan
};

/// Seconds of a device whose items are padded to the longest; 0 without items. In rounded arithmetic, too, not
/// descending in each of the numbers.
[[nodiscard]] inline double padded_seconds(const LoadModel& model, std::size_t items, double longest) {
  if (items == 0) return 0.0;
  return model.fixed_seconds + model.seconds_per_cost * (static_cast<double>(items) * longest);
}

/// The groups with the least makespan. Requires at least one item and one device.
[[nodiscard]] PaddedCover cover_items(const PaddedProblem& problem);

}  // namespace paceline::plan::detail

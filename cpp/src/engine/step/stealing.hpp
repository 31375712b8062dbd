// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

#include <paceline/device_id.hpp>

namespace paceline::internal {

/// When a device will be free that was expected to be free at `expected`. If it is late by x, assume that it needs x
/// more. This is right within a factor of two for any slowdown.
inline double free_at(double expected, double now) { return std::max(expected, 2.0 * now - expected); }

/// The device from which another one takes work, and when it would finish if nothing were taken.
struct Victim {
  DeviceId device = 0;
  double finish = 0.0;
};

/// The device, other than `thief`, that would finish last and has something left to hand out; none if there is none.
/// `finish_of(device)`: when it would finish; none if it has nothing left. Among equals the first device.
template <class FinishOf>
std::optional<Victim> find_victim(std::size_t device_count, DeviceId thief, const FinishOf& finish_of) {
  std::optional<Victim> victim;
  for (std::size_t d = 0; d < device_count; ++d) {
    if (d == thief) continue;
    const std::optional<double> finish = finish_of(d);
    if (finish && (!victim || *finish > victim->finish)) victim = Victim{d, *finish};
  }
  return victim;
}

}  // namespace paceline::internal

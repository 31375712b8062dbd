// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

namespace paceline::engine {

/// When a device will be free that was expected to be by then. When it is overdue by x, expect it to need x more: the
/// estimate stays right for any slowdown within a factor of two.
inline double free_at(double expected, double now) { return std::max(expected, 2.0 * now - expected); }

/// The device from which another takes work, and when it would finish without that.
struct Victim {
  std::size_t device = 0;
  double finish = 0.0;
};

/// The device that would finish last, of those but `thief` that have something left to hand out; none if none has.
/// `finish_of(device)`: when it would, none if it has nothing left. Of equals the first.
template <class FinishOf>
std::optional<Victim> find_victim(std::size_t device_count, std::size_t thief, const FinishOf& finish_of) {
  std::optional<Victim> victim;
  for (std::size_t d = 0; d < device_count; ++d) {
    if (d == thief) continue;
    const std::optional<double> finish = finish_of(d);
    if (finish && (!victim || *finish > victim->finish)) victim = Victim{d, *finish};
  }
  return victim;
}

}  // namespace paceline::engine

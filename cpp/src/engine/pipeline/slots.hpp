// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <paceline/plan/schedule.hpp>

namespace paceline::internal {

/// Which lane or buffer each micro-batch has while it is in flight.
struct Slots {
  std::vector<std::size_t> of;  ///< of each micro-batch
  std::size_t count = 0;
};

/// Gives each micro-batch the lowest slot that is free when the stage begins with it. The slot is free again when the
/// stage has run the micro-batch's last action. So a schedule may run its backwards in any order. Requires: a checked
/// schedule.
[[nodiscard]] inline Slots slots_of(const plan::Schedule& schedule, std::size_t stage) {
  const auto count = static_cast<std::size_t>(schedule.micro_batches);
  const std::vector<plan::Action>& actions = schedule.stages[stage];
  std::vector<std::size_t> left(count, 0);
  for (const plan::Action& action : actions) ++left[static_cast<std::size_t>(action.micro_batch)];
  Slots slots{.of = std::vector<std::size_t>(count, 0)};
  std::vector<bool> taken;
  for (const plan::Action& action : actions) {
    const auto m = static_cast<std::size_t>(action.micro_batch);
    if (action.kind == plan::Action::Kind::forward) {
      const auto free = std::find(taken.begin(), taken.end(), false);
      slots.of[m] = static_cast<std::size_t>(free - taken.begin());
      if (free == taken.end()) taken.push_back(false);
      taken[slots.of[m]] = true;
    }
    if (--left[m] == 0) taken[slots.of[m]] = false;
  }
  slots.count = taken.size();
  return slots;
}

}  // namespace paceline::internal

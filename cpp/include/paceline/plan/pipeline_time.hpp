// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/schedule.hpp>

namespace paceline::plan {

/// What one micro-batch takes on one stage, in seconds.
struct StageTimes {
  double forward = 0.0;
  double backward = 0.0;
  double send_forward = 0.0;   ///< from the end of a forward until the next stage has its output; hidden behind work
  double send_backward = 0.0;  ///< from the end of a backward until the stage before has its gradient
};

struct ActionSpan {
  double start = 0.0;
  double finish = 0.0;
};

/// When everything happens, in seconds after the first action may start.
struct PipelineTimes {
  double seconds = 0.0;                          ///< when the last action ends
  std::vector<double> busy_seconds;              ///< per stage
  std::vector<std::vector<ActionSpan>> actions;  ///< as Schedule::stages
};

/// The exact recurrence: an action starts when its stage is free and its input has arrived. A forward's input is the
/// output of the stage before; a backward's is the gradient of the stage behind, or, on the last stage, its own
/// forward.
///
/// `stages` has one entry per stage. `scale` has one factor per micro-batch, for micro-batches of unequal size; empty:
/// 1 each. O(stages * micro-batches).
///
/// @throws InvalidArgument for sizes that do not match, negative or not finite times, and a schedule that check()
/// refuses.
[[nodiscard]] PACELINE_API PipelineTimes pipeline_times(const Schedule& schedule, std::span<const StageTimes> stages,
                                                        std::span<const double> scale = {});

/// The mean step, in seconds, over `samples` runs in which the time of each action is multiplied by a random factor of
/// mean 1 and relative standard deviation noise[stage] (log-normal, from a fixed seed, the same factors for every
/// schedule that is compared). Without noise it is pipeline_times().seconds.
[[nodiscard]] PACELINE_API double expected_seconds(const Schedule& schedule, std::span<const StageTimes> stages,
                                                   std::span<const double> noise, std::size_t samples = 32,
                                                   std::span<const double> scale = {});

}  // namespace paceline::plan

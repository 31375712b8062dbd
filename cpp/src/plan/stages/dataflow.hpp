// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>

namespace paceline::plan {

/// One action of a schedule, with what it waits for: the action before it on its stage, and `input`.
struct FlowAction {
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::size_t stage = 0;
  std::size_t position = 0;   ///< in Schedule::stages[stage]
  std::size_t output = 0;     ///< its number: forwards first, then backwards; by stage, then by micro-batch
  std::size_t input = kNone;  ///< the number of the action whose output it needs
  std::size_t micro_batch = 0;
  bool forward = true;
};

/// The actions of a schedule in an order in which every action comes after what it waits for.
/// @throws InvalidArgument as check()
[[nodiscard]] std::vector<FlowAction> dataflow(const Schedule& schedule);

/// One stage as the recurrence needs it: `larger` for the first `larger_count` micro-batches, `smaller` for the others.
struct TwoSizes {
  std::span<const StageTimes> larger;
  std::span<const StageTimes> smaller;
  std::size_t larger_count = 0;

  [[nodiscard]] const StageTimes& of(const FlowAction& action) const {
    return (action.micro_batch < larger_count ? larger : smaller)[action.stage];
  }
};

/// The times of all actions of a schedule. Calls seconds(action) for how long one takes, and send(action) for how long
/// its output travels; calls done(action, span).
template <class Seconds, class Send, class Done>
double replay(const std::vector<FlowAction>& flow, std::size_t stages, const Seconds& seconds, const Send& send,
              const Done& done) {
  std::vector<double> free(stages, 0.0);
  std::vector<double> arrival(flow.size(), 0.0);  // numbers of forwards alone are below flow.size(), too
  double last = 0.0;
  for (const FlowAction& action : flow) {
    double start = free[action.stage];
    if (action.input != FlowAction::kNone && arrival[action.input] > start) start = arrival[action.input];
    const double finish = start + seconds(action);
    free[action.stage] = finish;
    // The last stage's outputs stay there.
    arrival[action.output] = action.forward && action.stage + 1 == stages ? finish : finish + send(action);
    if (finish > last) last = finish;
    done(action, ActionSpan{start, finish});
  }
  return last;
}

/// As the default of expected_seconds().
inline constexpr std::size_t kNoiseSamples = 32;

/// The mean step of expected_seconds() for micro-batches of two sizes.
[[nodiscard]] double noisy_mean(const std::vector<FlowAction>& flow, std::size_t stages, const TwoSizes& times,
                                std::span<const double> noise, std::size_t samples);

}  // namespace paceline::plan

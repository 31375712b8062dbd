// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>

namespace paceline::plan {

/// One action of a schedule.
struct FlowAction {
  std::size_t stage = 0;
  std::size_t position = 0;  ///< in Schedule::stages[stage]
  std::size_t micro_batch = 0;
  bool forward = true;
};

/// The actions of a schedule in an order in which every action comes after what it waits for.
/// @throws InvalidArgument as check()
[[nodiscard]] std::vector<FlowAction> dataflow(const Schedule& schedule);

/// The recurrence: an action starts when its stage is free and its input has arrived. Actions are run in an order in
/// which every action comes after what it waits for.
class Recurrence {
 public:
  void begin(std::size_t stages, std::size_t micro_batches) {
    count_ = micro_batches;
    free_.assign(stages, 0.0);
    arrival_.resize(2 * stages * count_);
  }
  /// `seconds`: of the action; `send`: until its output is where it is needed.
  ActionSpan run(std::size_t stage, std::size_t micro_batch, bool forward, double seconds, double send) {
    // Forwards come first, then backwards; by stage, then by micro-batch. The input of a backward of the last stage is
    // there: the stage has run its forward.
    const std::size_t at = ((forward ? 0 : free_.size()) + stage) * count_ + micro_batch;
    double start = free_[stage];
    const bool waits = forward ? stage > 0 : stage + 1 < free_.size();
    if (waits) start = std::max(start, arrival_[forward ? at - count_ : at + count_]);
    free_[stage] = start + seconds;
    arrival_[at] = free_[stage] + send;
    return {start, free_[stage]};
  }
  /// When the last action of a stage ends.
  [[nodiscard]] double finish(std::size_t stage) const { return free_[stage]; }
  [[nodiscard]] double seconds() const { return *std::ranges::max_element(free_); }

 private:
  std::size_t count_ = 0;
  std::vector<double> free_;
  std::vector<double> arrival_;
};

/// What actions take: `larger` for the first `larger_count` micro-batches, `smaller` for the others, each times the
/// `scale` of its micro-batch, if there is one.
struct FlowTimes {
  std::span<const StageTimes> larger;
  std::span<const StageTimes> smaller = {};
  std::size_t larger_count = std::numeric_limits<std::size_t>::max();
  std::span<const double> scale = {};

  [[nodiscard]] const StageTimes& of(std::size_t stage, std::size_t micro_batch) const {
    return (micro_batch < larger_count ? larger : smaller)[stage];
  }
  [[nodiscard]] double seconds(const FlowAction& action) const {
    const StageTimes& times = of(action.stage, action.micro_batch);
    return (action.forward ? times.forward : times.backward) * factor(action);
  }
  [[nodiscard]] double send(const FlowAction& action) const {
    const StageTimes& times = of(action.stage, action.micro_batch);
    return (action.forward ? times.send_forward : times.send_backward) * factor(action);
  }

 private:
  [[nodiscard]] double factor(const FlowAction& action) const {
    return scale.empty() ? 1.0 : scale[action.micro_batch];
  }
};

/// The mean step of expected_seconds().
[[nodiscard]] double noisy_mean(const std::vector<FlowAction>& flow, const FlowTimes& times,
                                std::span<const double> noise, std::size_t samples);

/// As the default of expected_seconds().
inline constexpr std::size_t kNoiseSamples = 32;

}  // namespace paceline::plan

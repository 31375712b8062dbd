// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/plan/stages.hpp>

#include "balance/estimator.hpp"

namespace paceline::balance {

/// What is known about the blocks and devices of a pipeline: what was measured once, corrected by the times of steps.
class StageKnowledge {
 public:
  explicit StageKnowledge(plan::StageProblem problem);

  /// Requires: one entry per stage of `plan`, one time per micro-batch and kind.
  void record(std::int64_t step, const plan::StagePlan& plan, std::span<const MeasuredStage> stages);

  /// The problem by present knowledge, as of a step that is still to come.
  [[nodiscard]] plan::StageProblem problem(std::int64_t step) const;
  /// Relative standard error of the speed of a device.
  [[nodiscard]] double error(std::size_t device) const { return estimator_.devices()[device].error; }
  /// Whether the times of the last step may not last, or new blocks are still being measured.
  [[nodiscard]] bool unsettled() const;

 private:
  /// One step of one stage.
  struct Sample {
    double predicted_forward = 0.0;  // at the device's given speed
    double predicted_backward = 0.0;
    double forward = 0.0;
    double backward = 0.0;
    std::int64_t step = 0;
    [[nodiscard]] double predicted() const { return predicted_forward + predicted_backward; }
    [[nodiscard]] double ratio() const { return (forward + backward) / predicted(); }
  };
  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };
  struct Device {
    Range blocks;                           // of its last stage
    std::optional<std::int64_t> last_seen;  // the last step in which it had one
    Range known;                            // the blocks before the present ones, which it was measured with
    bool judging = false;                   // whether `known` says anything about the present blocks
    std::vector<Sample> waiting;            // the first steps with the present blocks
    bool settling = false;
    std::vector<double> action_noise;  // of each of its last steps
    bool tried_again = false;          // it was left out, and counts as fast as at first until it is measured
    std::int64_t try_after = 0;        // steps without a stage
  };

  [[nodiscard]] Sample predict(std::size_t device, Range blocks, const plan::StagePlan& plan) const;
  void measure_noise(Device& device, const plan::StagePlan& plan, const MeasuredStage& timings);
  void settle(std::size_t device, const plan::StagePlan& plan);
  void correct_blocks(std::size_t device, const plan::StagePlan& plan, const Sample& middle);
  [[nodiscard]] double best_scale() const;
  [[nodiscard]] double scale(std::size_t device) const;
  [[nodiscard]] bool trying_again(std::size_t device, std::int64_t step) const;

  plan::StageProblem problem_;  // devices as given, blocks corrected
  Estimator estimator_;
  std::vector<Device> devices_;
  bool hurry_ = false;  // a device was tried again in vain: to leave it out is more urgent than to learn about blocks
};

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::sim {

/// A pipeline on simulated devices. What the problem says is the truth; StageDevice::noise is the noise of each action.
struct PipelineOptions {
  plan::StageProblem problem = {};
  std::vector<Throttle> throttles = {};
  std::uint64_t seed = 0;
};

/// What one step of a simulated pipeline took.
struct PipelineOutcome {
  double seconds = 0.0;
  std::vector<balance::MeasuredStage> timings;         ///< per stage
  std::vector<std::vector<plan::ActionSpan>> actions;  ///< per stage, in the order of its schedule
  double bubble = 0.0;                                 ///< the part of the step in which stages are idle
};

/// The devices of a pipeline on a virtual clock. The time of an action depends only on the seed, the step, the device,
/// the blocks and items, and how many actions the device ran before it in the step. Immutable.
class PACELINE_API PipelineBox {
 public:
  /// @throws InvalidArgument for a throttle that is not valid.
  explicit PipelineBox(PipelineOptions options);

  /// Runs the schedule of a plan: an action starts when its device is free and its input has arrived. The time of each
  /// one is multiplied by a log-normal factor of mean 1.
  /// @throws InvalidArgument for a plan that is not of this problem.
  [[nodiscard]] PipelineOutcome run(std::int64_t step, const plan::StagePlan& plan) const;
  /// The problem at a step, with the devices' true speeds.
  [[nodiscard]] plan::StageProblem truth(std::int64_t step) const;

 private:
  PipelineOptions options_;
};

/// The usual pipeline: the blocks divided evenly by number among all devices, in their order.
/// @throws InvalidArgument for fewer blocks than devices; OutOfMemory if a stage does not fit its device.
[[nodiscard]] PACELINE_API plan::StagePlan even_pipeline(const plan::StageProblem& problem, std::int64_t micro_batches,
                                                         bool gpipe);

struct PipelineSimulationOptions {
  PipelineOptions pipeline = {};
  plan::StageOptions plan = {};
  balance::MoveCost move_cost = {};
  std::int64_t steps = 100;
};

struct PipelineSimulationResult {
  double elapsed_seconds = 0.0;           ///< all steps and moves, by the balancer
  double unmoved_seconds = 0.0;           ///< all steps with the first plan, under the same noise
  double oracle_seconds = 0.0;            ///< all steps, each with the best plan for its true speeds, moves for nothing
  std::vector<double> step_seconds;       ///< by the balancer, without moves
  std::vector<balance::StageMove> moves;  ///< all changes of plans
  plan::StagePlan first_plan;
  plan::StagePlan last_plan;
  std::string explanation;  ///< StageBalancer::explain() at the end
};

/// Runs one balancer over one pipeline, which gets the true costs of blocks and the speeds without throttles.
/// @throws InvalidArgument if an option is not valid; OutOfMemory if no plan fits.
[[nodiscard]] PACELINE_API PipelineSimulationResult simulate_pipeline(const PipelineSimulationOptions& options);

}  // namespace paceline::sim

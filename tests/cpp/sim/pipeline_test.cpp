// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/pipeline.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include <paceline/error.hpp>

#include "errors.hpp"

namespace paceline::sim {
namespace {

PipelineSimulationOptions options(double noise = 0.0, double bytes_per_second = 0.0) {
  PipelineSimulationOptions out;
  plan::StageProblem& problem = out.pipeline.problem;
  problem.blocks.assign(10, {.forward_fixed = 0.0001,
                             .forward_per_item = 0.0004,
                             .backward_fixed = 0.0002,
                             .backward_per_item = 0.0008,
                             .parameter_bytes = 1 << 20,
                             .boundary_bytes_per_item = 1 << 12});
  for (std::size_t i = 0; i < 2; ++i) {
    problem.devices.push_back({.name = "sim:" + std::to_string(i), .noise = noise, .memory_space = i});
  }
  problem.batch_size = 30;
  problem.link = {.latency_seconds = 1e-4, .bytes_per_second = bytes_per_second};
  out.plan.micro_batches = 7;  // of unequal sizes
  out.steps = 60;
  out.pipeline.throttles = {{.device = 0, .factor = 2.0, .from = 20, .to = 1000}};
  return out;
}

TEST(PipelineBox, WithoutNoiseAStepTakesWhatThePlannerPredicts) {
  const PipelineSimulationOptions given = options(0.0, 1e8);
  const plan::StagePlan plan = plan::plan_stages(given.pipeline.problem, given.plan);
  const PipelineOutcome outcome = PipelineBox(given.pipeline).run(0, plan);
  EXPECT_NEAR(outcome.seconds / plan.seconds, 1.0, 1e-9);
  EXPECT_GT(PipelineBox(given.pipeline).run(20, plan).seconds, 1.3 * outcome.seconds);
}

TEST(PipelineBox, TheEvenPipelineHasTheBubbleOfTheFormula) {
  plan::StageProblem problem = options().pipeline.problem;
  for (plan::StageDevice& device : problem.devices) device.memory_space = 0;
  problem.batch_size = 24;
  for (const bool gpipe : {false, true}) {
    const plan::StagePlan plan = even_pipeline(problem, 8, gpipe);
    EXPECT_EQ(plan.cuts, (std::vector<std::size_t>{0, 5}));
    const PipelineOutcome outcome = PipelineBox({.problem = problem}).run(0, plan);
    EXPECT_NEAR(outcome.bubble, 1.0 / 9.0, 1e-9);  // (k - 1) / (m + k - 1)
    EXPECT_EQ(outcome.actions[1].size(), 16u);
    EXPECT_NEAR(outcome.actions[1][0].start, outcome.actions[0][0].finish, 1e-12);
  }
  problem.blocks.resize(1);
  EXPECT_THROW((void)even_pipeline(problem, 8, false), InvalidArgument);
}

TEST(PipelineBox, NoiseHasMeanOneAndTheGivenDeviation) {
  const PipelineSimulationOptions given = options(0.4);
  const plan::StagePlan plan = plan::plan_stages(given.pipeline.problem, given.plan);
  const PipelineBox box(given.pipeline);
  const PipelineOutcome quiet = PipelineBox(options().pipeline).run(0, plan);
  double sum = 0.0;
  double squares = 0.0;
  double count = 0.0;
  for (int step = 0; step < 20; ++step) {
    const PipelineOutcome noisy = box.run(step, plan);
    for (std::size_t i = 0; i < noisy.timings.size(); ++i) {
      for (std::size_t j = 0; j < plan.sizes.size(); ++j, count += 1.0) {
        const double factor = noisy.timings[i].forwards[j] / quiet.timings[i].forwards[j];
        sum += factor;
        squares += (factor - 1.0) * (factor - 1.0);
      }
    }
  }
  EXPECT_NEAR(sum / count, 1.0, 0.072);  // three standard errors of 280 factors
  EXPECT_NEAR(std::sqrt(squares / count), 0.4, 0.08);
}

TEST(PipelineSimulation, TheBalancerFollowsADeviceThatSlowsDown) {
  const PipelineSimulationResult result = simulate_pipeline(options(0.03));
  EXPECT_EQ(result.step_seconds.size(), 60u);
  EXPECT_LT(result.elapsed_seconds, 0.9 * result.unmoved_seconds);
  EXPECT_LT(result.elapsed_seconds, 1.05 * result.oracle_seconds);
  ASSERT_FALSE(result.moves.empty());
  EXPECT_GE(result.moves.front().step, 21);
  EXPECT_NE(result.last_plan.cuts, result.first_plan.cuts);
  EXPECT_TRUE(says(result.explanation, "sets the pace"));
}

TEST(PipelineSimulation, MovesTakeTheTimeOfTheirBytes) {
  PipelineSimulationOptions given = options();
  given.move_cost = {.bytes_per_second = 1e8, .first_run_seconds = 0.5};
  const PipelineSimulationResult result = simulate_pipeline(given);
  double costs = 0.0;
  for (const balance::StageMove& move : result.moves) {
    const double bytes = static_cast<double>(move.moved_bytes);
    EXPECT_NEAR(move.cost_seconds, move.moved_bytes > 0 ? bytes / 1e8 + 0.5 : 0.0, 1e-12);
    costs += move.cost_seconds;
  }
  EXPECT_GT(costs, 0.5);
  const double steps = std::accumulate(result.step_seconds.begin(), result.step_seconds.end(), 0.0);
  EXPECT_NEAR(result.elapsed_seconds, steps + costs, 1e-9);
}

TEST(PipelineSimulation, EqualOptionsGiveEqualResults) {
  const PipelineSimulationResult one = simulate_pipeline(options(0.1));
  const PipelineSimulationResult two = simulate_pipeline(options(0.1));
  EXPECT_EQ(one.step_seconds, two.step_seconds);
  PipelineSimulationOptions other = options(0.1);
  other.pipeline.seed = 1;
  EXPECT_NE(simulate_pipeline(other).step_seconds, one.step_seconds);
}

TEST(PipelineSimulation, RefusesThrottlesThatMakeNoSense) {
  PipelineSimulationOptions given = options();
  given.pipeline.throttles = {{.device = 2, .factor = 2.0, .from = 0, .to = 5}};
  EXPECT_THROW((void)simulate_pipeline(given), InvalidArgument);
  given.pipeline.throttles = {{.device = 0, .factor = 0.0, .from = 0, .to = 5}};
  EXPECT_THROW((void)simulate_pipeline(given), InvalidArgument);
  given.pipeline.throttles.clear();
  given.steps = 0;
  EXPECT_THROW((void)simulate_pipeline(given), InvalidArgument);
}

}  // namespace
}  // namespace paceline::sim

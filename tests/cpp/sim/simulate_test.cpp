// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include <paceline/balance/balancer.hpp>
#include <paceline/error.hpp>
#include <paceline/sim/box.hpp>
#include <paceline/sim/simulate.hpp>

#include "errors.hpp"

namespace paceline::sim {
namespace {

SimulationOptions box_of(const std::vector<double>& speeds, double noise = 0.03) {
  SimulationOptions options;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    SimDevice device;
    device.name = "sim:" + std::to_string(i);
    device.speed = speeds[i];
    options.box.devices.push_back(device);
  }
  options.box.noise = noise;
  return options;
}

SimulationOptions eight_equal(double noise = 0.03) { return box_of(std::vector<double>(8, 1.0), noise); }

struct Summary {
  double mean_loss = 0.0;
  double worst_loss = 0.0;
  double worst_moves = 0.0;
  std::vector<double> losses;
  std::vector<std::int64_t> worst_recovery;  // per event; -1 if a seed never recovered
};

Summary over_seeds(SimulationOptions options, int seeds) {
  Summary summary;
  for (int seed = 1; seed <= seeds; ++seed) {
    options.box.seed = static_cast<std::uint64_t>(seed);
    const SimulationResult result = simulate(options);
    summary.mean_loss += result.loss_to_ideal / seeds;
    summary.losses.push_back(result.loss_to_ideal);
    summary.worst_loss = std::max(summary.worst_loss, result.loss_to_ideal);
    summary.worst_moves = std::max(summary.worst_moves, result.moves_per_100_steps);
    summary.worst_recovery.resize(result.steps_to_recover.size(), 0);
    for (std::size_t e = 0; e < result.steps_to_recover.size(); ++e) {
      std::int64_t& worst = summary.worst_recovery[e];
      if (!result.steps_to_recover[e]) worst = -1;
      if (worst >= 0) worst = std::max(worst, *result.steps_to_recover[e]);
    }
  }
  return summary;
}

TEST(Simulation, AQuietBoxIsLeftAlone) {
  for (const std::int64_t steps : {400, 800}) {
    SimulationOptions options = eight_equal();
    options.steps = steps;
    const Summary summary = over_seeds(options, 20);
    EXPECT_LE(summary.worst_loss, 0.0035) << steps;
    EXPECT_LE(summary.worst_moves, 0.5) << steps;
  }
}

TEST(Simulation, AThrottleIsFollowedInTheNextStepAndCostsLittle) {
  SimulationOptions options = eight_equal();
  options.steps = 800;
  options.box.throttles = {{3, 2.0, 200, 600}};
  const Summary summary = over_seeds(options, 50);
  EXPECT_LE(summary.mean_loss, 0.004);
  // Items are whole. In one run of twenty (18 of 400 unseen seeds) the split settles one item (0.9 %) off the best,
  // which is less than the gate requires.
  EXPECT_GE(std::count_if(summary.losses.begin(), summary.losses.end(), [](double loss) { return loss <= 0.005; }), 45);
  EXPECT_LE(summary.worst_loss, 0.008);
  EXPECT_EQ(summary.worst_recovery, (std::vector<std::int64_t>{1, 1}));
}

TEST(Simulation, AStaticMixIsFound) {
  SimulationOptions options = box_of({1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5});
  options.steps = 800;
  EXPECT_LE(over_seeds(options, 10).mean_loss, 0.004);
  options.policy = Balance::even;
  EXPECT_GE(over_seeds(options, 1).mean_loss, 0.4);
}

TEST(Simulation, FlappingCostsLessThanDoingNothing) {
  SimulationOptions options = eight_equal();
  options.steps = 800;
  for (std::int64_t k = 0; k < options.steps; k += 40) options.box.throttles.push_back({3, 1.5, k, k + 4});
  const double adaptive = over_seeds(options, 5).mean_loss;
  options.policy = Balance::even;
  EXPECT_LT(adaptive, 0.7 * over_seeds(options, 5).mean_loss);
}

TEST(Simulation, TwoDevicesOfWhichOneIsTwiceAsFast) {
  SimulationOptions options = box_of({1.0, 0.5});
  const Summary summary = over_seeds(options, 10);
  EXPECT_LE(summary.mean_loss, 0.012);  // the first three steps make up 0.4 %
}

TEST(Simulation, CalmNoiseIsBalancedFiner) {
  SimulationOptions options = eight_equal(0.01);
  options.steps = 800;
  options.box.throttles = {{3, 2.0, 200, 600}};
  EXPECT_LE(over_seeds(options, 10).worst_loss, 0.004);
}

TEST(Simulation, ABusyNeighboursNoiseIsNotChased) {
  SimulationOptions options = box_of({1.0, 1.0}, 0.08);
  EXPECT_LE(over_seeds(options, 10).worst_loss, 0.01);
}

TEST(Simulation, NoiseThatLastsIsNotChasedEither) {
  SimulationOptions options = box_of({1.0, 1.0}, 0.069);
  options.steps = 800;
  // As measured on two quiet cores; see the scenario "correlated".
  options.box.lasting_noise = {{0.0655, 3.64, false}, {0.0465, 3, true}, {0.051, 40, true}, {0.062, 1000, true}};
  const Summary summary = over_seeds(options, 30);
  EXPECT_LE(summary.mean_loss, 0.003);
  EXPECT_LE(summary.worst_loss, 0.01);
  EXPECT_LE(summary.worst_moves, 1.5);
  options.box.devices.resize(8, options.box.devices[0]);
  EXPECT_LE(over_seeds(options, 10).worst_loss, 0.0035);
}

TEST(Simulation, ClassesLearnTheirOwnShapes) {
  SimulationOptions options = box_of({1.0, 1.0, 1.0, 1.0});
  for (const std::size_t i : {2u, 3u}) {
    options.box.devices[i].device_class = "old";
    options.box.devices[i].fixed_seconds = 0.012;
    options.box.devices[i].per_item_seconds = 0.00015;
  }
  EXPECT_LE(over_seeds(options, 10).mean_loss, 0.012);
}

TEST(Simulation, SpikesMoveNothing) {
  SimulationOptions options = eight_equal();
  options.steps = 800;
  options.box.spike_probability = 0.005;
  options.box.spike_factor = 1.5;
  EXPECT_LE(over_seeds(options, 10).worst_loss, 0.002);
}

/// Ski rental: the cost of a disturbance, including first runs of sizes, against the best choice with its length known:
/// stay or move at once. The mean of ten runs, because some runs need two moves to find a split, and each costs first
/// runs.
TEST(Simulation, CostlyMovesCostAtMostALittleMoreThanTwiceWhatAnOracleWouldPay) {
  constexpr int kSeeds = 10;
  for (const std::int64_t length : {10, 30, 100, 300, 900}) {
    for (const double first_run : {0.05, 0.5, 5.0}) {
      double extra = 0.0;
      double bound = 0.0;
      for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        SimulationOptions options = box_of({1.0, 1.0}, 0.01);
        options.steps = 1000;
        options.box.seed = seed;
        for (SimDevice& device : options.box.devices) device.first_run_seconds = first_run;
        const SimulationResult calm = simulate(options);
        options.box.throttles = {{1, 1.5, 50, 50 + length}};
        const SimulationResult result = simulate(options);
        extra += (result.elapsed_seconds - result.ideal_seconds - calm.elapsed_seconds + calm.ideal_seconds) / kSeeds;
        const Box box(options.box);
        const std::int64_t half = options.batch_size / 2;
        const double lost = box.makespan(55, {half, half}) - box.ideal(60, options.batch_size);
        const double oracle = std::min(first_run, lost * static_cast<double>(length));
        bound = 2.0 * oracle + 8.0 * lost;  // eight steps to see the change, to be sure of it, and to see its end
      }
      EXPECT_LE(extra, bound) << length << " steps, " << first_run << " s";
    }
  }
}

TEST(Simulation, GoesOnWithoutADeviceThatFails) {
  for (const Balance policy : {Balance::automatic, Balance::even, Balance::weighted}) {
    SimulationOptions options = eight_equal();
    options.policy = policy;
    options.box.failures = {{5, 200}};
    const SimulationResult result = simulate(options);
    EXPECT_EQ(result.lost_steps, 1);
    EXPECT_EQ(result.final_shares[5], 0);
    EXPECT_EQ(result.steps_to_recover, (std::vector<std::optional<std::int64_t>>{0}));
    EXPECT_LE(result.loss_to_ideal, 0.02);
  }
}

TEST(Simulation, SaysWhichDeviceWasTheLastToFail) {
  SimulationOptions options = box_of({1.0, 1.0});
  options.box.failures = {{0, 10}, {1, 20}};
  const auto error = thrown_by<Error>([&] { simulate(options); });
  EXPECT_EQ(error.device(), "sim:1");
}

TEST(Simulation, EqualOptionsGiveEqualResults) {
  SimulationOptions options = eight_equal();
  options.box.throttles = {{3, 2.0, 100, 200}};
  options.box.seed = 4;
  const SimulationResult a = simulate(options);
  const SimulationResult b = simulate(options);
  EXPECT_EQ(a.loss_to_ideal, b.loss_to_ideal);
  EXPECT_EQ(a.elapsed_seconds, b.elapsed_seconds);
  EXPECT_EQ(a.explanation, b.explanation);
  options.box.seed = 5;
  EXPECT_NE(a.elapsed_seconds, simulate(options).elapsed_seconds);
}

TEST(Simulation, ARecoveryThatNeverComesIsNone) {
  SimulationOptions options = eight_equal(0.0);
  options.policy = Balance::even;
  options.box.throttles = {{3, 2.0, 100, 200}};
  EXPECT_EQ(simulate(options).steps_to_recover, (std::vector<std::optional<std::int64_t>>{std::nullopt, 0}));
}

TEST(Simulation, WeightedByTrueSpeedsLosesOnlyTheFixedPart) {
  SimulationOptions options = box_of({1.0, 0.5}, 0.0);
  options.policy = Balance::weighted;
  for (SimDevice& device : options.box.devices) device.fixed_seconds = 0.0;
  EXPECT_NEAR(simulate(options).loss_to_ideal, 0.0, 1e-9);
  EXPECT_EQ(simulate(options).moves, 0);
}

class Scale : public testing::TestWithParam<std::size_t> {};

TEST_P(Scale, LosesAtMostOnePercentOnceSettledAThrottleIncluded) {
  constexpr std::int64_t kSteps = 300;
  constexpr std::int64_t kSettled = 60;
  BoxOptions options;
  balance::BalancerOptions devices;
  for (std::size_t i = 0; i < GetParam(); ++i) {
    SimDevice device;
    device.name = "sim:" + std::to_string(i);
    device.speed = i % 2 == 0 ? 1.0 : 0.5;
    options.devices.push_back(device);
    devices.devices.push_back({device.name, "sim", {}});
  }
  options.noise = 0.02;
  options.seed = 1;
  options.throttles = {{0, 2.0, 200, kSteps}};
  Box box(options);
  balance::Balancer balancer(devices);
  const std::int64_t batch = 64 * static_cast<std::int64_t>(GetParam());
  double ideal = 0.0;
  double used = 0.0;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const balance::StepPlan plan = balancer.next_plan(batch);
    if (step >= kSettled) {
      ideal += box.ideal(step, batch);
      used += box.makespan(step, plan.shares);
    }
    balancer.record(box.run(step, plan.shares).timings);
  }
  EXPECT_LE(used / ideal - 1.0, 0.01);
}

INSTANTIATE_TEST_SUITE_P(Devices, Scale, testing::Values(2, 4, 8, 16, 32, 64, 128, 256));

}  // namespace
}  // namespace paceline::sim

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <paceline/engine/stage_planner.hpp>
#include <paceline/error.hpp>

#include "engine/pipeline/block_costs.hpp"

namespace paceline::internal {
namespace {

bool same_run(const plan::StagePlan& a, const plan::StagePlan& b) {
  return a.cuts == b.cuts && a.order == b.order && a.sizes == b.sizes && a.schedule == b.schedule;
}

/// Devices whose times follow from numbers: a block takes its fixed and per-item seconds over the device's speed.
struct Box {
  std::vector<plan::BlockCost> costs;
  std::vector<double> speeds;

  [[nodiscard]] plan::StageProblem problem() const {
    plan::StageProblem guess{.blocks = costs, .devices = {}};
    for (auto& block : guess.blocks) block = {.forward_per_item = 1.0, .backward_per_item = 2.0};
    for (std::size_t d = 0; d < speeds.size(); ++d) guess.devices.push_back({.name = "host:" + std::to_string(d)});
    return guess;
  }
  [[nodiscard]] double seconds(std::size_t block, std::size_t device, bool backward, std::int64_t items) const {
    const plan::BlockCost& cost = costs[block];
    const double n = static_cast<double>(items);
    return (backward ? cost.backward_fixed + cost.backward_per_item * n
                     : cost.forward_fixed + cost.forward_per_item * n) /
           speeds[device];
  }
  template <class Call>
  void for_each_block(const plan::StagePlan& plan, Call call) const {
    for (std::size_t s = 0; s < plan.order.size(); ++s) {
      const std::size_t end = s + 1 < plan.cuts.size() ? plan.cuts[s + 1] : costs.size();
      for (std::size_t b = plan.cuts[s]; b < end; ++b) call(s, b);
    }
  }
  [[nodiscard]] std::vector<BlockSample> samples(const plan::StagePlan& plan) const {
    std::vector<BlockSample> all;
    const std::int64_t items = plan.sizes.front();
    for_each_block(plan, [&](std::size_t s, std::size_t b) {
      for (const bool backward : {false, true}) {
        all.push_back({b, plan.order[s], backward, items, seconds(b, plan.order[s], backward, items)});
      }
    });
    return all;
  }
  [[nodiscard]] std::vector<balance::MeasuredStage> timings(const plan::StagePlan& plan) const {
    std::vector<balance::MeasuredStage> all(plan.order.size());
    for (auto& stage : all) stage.forwards = stage.backwards = std::vector<double>(plan.sizes.size(), 0.0);
    for_each_block(plan, [&](std::size_t s, std::size_t b) {
      for (std::size_t m = 0; m < plan.sizes.size(); ++m) {
        all[s].forwards[m] += seconds(b, plan.order[s], false, plan.sizes[m]);
        all[s].backwards[m] += seconds(b, plan.order[s], true, plan.sizes[m]);
      }
    });
    return all;
  }
};

std::vector<std::size_t> blocks_of_devices(const plan::StagePlan& plan, const Box& box) {
  std::vector<std::size_t> blocks(box.speeds.size(), 0);
  box.for_each_block(plan, [&](std::size_t s, std::size_t) { ++blocks[plan.order[s]]; });
  return blocks;
}

const Box kBox{
    std::vector<plan::BlockCost>(8, {.forward_fixed = 1e-3, .forward_per_item = 1e-3, .backward_per_item = 2e-3}),
    {1.0, 0.3, 1.0}};

TEST(StagePlanner, MeasuresEachBlockOnTwoDevicesInTwoSizesAndThenKnowsThem) {
  StagePlanner planner(kBox.problem(), {}, {}, true);
  std::set<std::pair<std::size_t, std::size_t>> seen;
  std::set<std::int64_t> sizes;
  int steps = 0;
  while (planner.measures()) {
    const auto plan = planner.plan(32);
    EXPECT_TRUE(same_run(*plan, *planner.plan(32))) << "a step that failed is planned again";
    kBox.for_each_block(*plan, [&](std::size_t s, std::size_t b) { seen.insert({b, plan->order[s]}); });
    sizes.insert(plan->sizes.front());
    planner.ran();
    EXPECT_EQ(planner.awaits_samples(), !planner.measures());
    planner.record(kBox.samples(*plan));
    ++steps;
  }
  EXPECT_EQ(steps, 3);
  EXPECT_GE(seen.size(), 16U);
  EXPECT_EQ(sizes.size(), 2U);
  EXPECT_FALSE(planner.awaits_samples());

  const auto plan = planner.plan(32);
  const std::vector<std::size_t> blocks = blocks_of_devices(*plan, kBox);
  EXPECT_LT(blocks[1], 2U) << planner.explain();
  plan::StageProblem known = kBox.problem();
  known.blocks = kBox.costs;
  for (std::size_t d = 0; d < 3; ++d) known.devices[d].speed = kBox.speeds[d];
  known.batch_size = 32;
  EXPECT_NEAR(plan->seconds, plan::plan_stages(known).seconds, 1e-6) << "as if it had been told";
}

TEST(StagePlanner, MeasuresInSmallerMicroBatchesWhenMemoryRunsOutAndEachTimeInSmallerOnes) {
  StagePlanner planner(kBox.problem(), {}, {}, true);
  std::int64_t before = 1000;
  for (int tries = 0; tries < 3; ++tries) {
    const auto plan = planner.plan(32);
    EXPECT_LT(plan->sizes.front(), before);
    before = plan->sizes.front();
    EXPECT_TRUE(planner.measures());
    if (before > 1) {
      EXPECT_TRUE(planner.out_of_memory(0));
    }
  }
  EXPECT_EQ(before, 1);
  while (planner.measures()) {
    const auto plan = planner.plan(32);
    EXPECT_EQ(plan->sizes.front(), 1) << "no larger ones, which would not fit either";
    planner.ran();
    planner.record(kBox.samples(*plan));
  }
}

TEST(StagePlanner, MeasuresInMicroBatchesThatFitTheDevices) {
  plan::StageProblem problem = kBox.problem();
  for (auto& block : problem.blocks) block.saved_bytes_per_item = 100;
  for (auto& device : problem.devices) device.memory_bytes = 700;  // three blocks with two items
  StagePlanner planner(problem, {}, {}, true);
  EXPECT_LE(planner.plan(32)->sizes.front(), 2);
  problem.devices[0].memory_bytes = problem.devices[1].memory_bytes = problem.devices[2].memory_bytes = 50;
  StagePlanner none(problem, {}, {}, true);
  EXPECT_THROW(static_cast<void>(none.plan(32)), OutOfMemory);
}

TEST(StagePlanner, MeasuresAgainOnceABatchCanTellWhatAMicroBatchCostsBesideItsItems) {
  StagePlanner planner(kBox.problem(), {}, {}, true);
  const auto measure = [&](std::int64_t items) {
    int steps = 0;
    while (planner.plan(items) && planner.measures()) {
      planner.ran();
      planner.record(kBox.samples(*planner.last()));
      ++steps;
    }
    return steps;
  };
  EXPECT_EQ(measure(1), 3);
  EXPECT_EQ(measure(8), 0) << "as many micro-batches of one item";
  EXPECT_EQ(measure(64), 3);
  EXPECT_EQ(measure(128), 0);
  EXPECT_NEAR(planner.known().blocks[0].forward_fixed / planner.known().blocks[0].forward_per_item, 1.0, 1e-6);
}

TEST(StagePlanner, PredictsWithTheStagesOfTrainingInMicroBatchesThatFit) {
  plan::StageProblem problem = kBox.problem();
  problem.blocks = kBox.costs;
  StagePlanner planner(problem, {}, {}, false);
  EXPECT_EQ(planner.predict(20)->sizes.size(), 8U) << "before the first step";
  const auto trains = planner.plan(32);
  const auto predicts = planner.predict(100, 2);
  EXPECT_EQ(predicts->cuts, trains->cuts);
  EXPECT_EQ(predicts->order, trains->order);
  EXPECT_LE(predicts->sizes.front(), trains->sizes.front());
  EXPECT_GE(predicts->sizes.back(), 2);
  EXPECT_TRUE(planner.out_of_memory_predicting(2));
  EXPECT_EQ(planner.predict(100)->sizes.front(), 1);
  EXPECT_FALSE(planner.out_of_memory_predicting(1));
  planner.retire(trains->order[0]);
  const auto without = planner.predict(20);  // it owns what is looked at
  for (const std::size_t device : without->order) EXPECT_NE(device, trains->order[0]);
}

TEST(StagePlanner, GivesARestoredDeviceAStageAgain) {
  plan::StageProblem problem = kBox.problem();
  problem.blocks = kBox.costs;
  problem.devices[1].speed = 0.3;
  StagePlanner planner(problem, {}, {}, false);
  const auto runs_on = [&](std::size_t device) {
    const auto plan = planner.plan(32);
    planner.record(*plan, kBox.timings(*plan));
    return blocks_of_devices(*plan, kBox)[device] > 0;
  };
  EXPECT_TRUE(runs_on(2));
  planner.retire(2);
  for (int k = 0; k < 4; ++k) EXPECT_FALSE(runs_on(2));
  planner.restore(2);
  bool back = false;
  for (int k = 0; k < 20 && !back; ++k) back = runs_on(2);
  EXPECT_TRUE(back) << planner.explain();
}

TEST(StagePlanner, KeepsTheMovesUntilThenWhenItIsToldTheCosts) {
  plan::StageProblem problem = kBox.problem();
  problem.blocks = kBox.costs;
  StagePlanner planner(problem, {}, {}, false);
  const auto step = [&] {
    const auto plan = planner.plan(32);
    planner.record(*plan, kBox.timings(*plan));
  };
  step();
  planner.retire(2);
  step();
  ASSERT_EQ(planner.move_count(), 1);
  planner.know(planner.known().blocks, kBox.speeds);
  EXPECT_EQ(planner.move_count(), 1);
  step();
  planner.retire(1);
  step();
  EXPECT_EQ(planner.move_count(), 2);
  const auto moves = planner.recent_moves();
  ASSERT_EQ(moves.size(), 2U);
  EXPECT_EQ(moves[0].step, 1);
  EXPECT_EQ(moves[1].step, 3);
  planner.measure_again();
  EXPECT_EQ(planner.move_count(), 2);
  EXPECT_EQ(planner.recent_moves().size(), 2U);
}

TEST(StagePlanner, CountsNoMovesWhileItMeasures) {
  StagePlanner planner(kBox.problem(), {}, {}, true);
  while (planner.measures()) {
    static_cast<void>(planner.plan(32));
    if (planner.recorded() == 2) planner.retire(2);
    const auto plan = planner.plan(32);
    planner.ran();
    planner.record(kBox.samples(*plan));
    EXPECT_EQ(planner.move_count(), 0);
    EXPECT_TRUE(planner.recent_moves().empty());
  }
}

TEST(StagePlanner, LeavesOutADeviceThatWasRetiredWhileItMeasured) {
  StagePlanner planner(kBox.problem(), {}, {}, true);
  for (int step = 0; step < 9; ++step) {
    if (step == 1) planner.retire(2);
    const bool measures = planner.measures();
    const auto plan = planner.plan(32);
    EXPECT_EQ(blocks_of_devices(*plan, kBox)[2] > 0, step == 0) << step;
    planner.ran();
    if (measures) planner.record(kBox.samples(*plan));
  }
  EXPECT_FALSE(planner.measures());
}

TEST(StagePlanner, IgnoresTheTimesOfAPlanThatWasReplaced) {
  plan::StageProblem problem = kBox.problem();
  problem.blocks = kBox.costs;
  StagePlanner planner(problem, {}, {}, false);
  const auto old = planner.plan(32);
  planner.retire(0);
  const auto now = planner.plan(32);
  ASSERT_FALSE(same_run(*old, *now));
  planner.record(*old, kBox.timings(*old));
  EXPECT_EQ(planner.balancer().steps(), 0);
  planner.record(*now, kBox.timings(*now));
  EXPECT_EQ(planner.balancer().steps(), 1);
}

/// What a device of this speed takes, for blocks whose backward takes twice as long as their forward.
BlockSample sample(const std::vector<plan::BlockCost>& blocks, std::size_t block, std::size_t device, double speed,
                   bool backward, std::int64_t items) {
  const plan::BlockCost& cost = blocks[block];
  const double seconds = cost.forward_fixed + cost.forward_per_item * static_cast<double>(items);
  return {block, device, backward, items, (backward ? 2.0 : 1.0) * seconds / speed};
}

TEST(BlockCosts, FindCostsAndSpeedsWhateverRanWhereAsLongAsDevicesAreLinked) {
  std::mt19937_64 rng(8);
  std::uniform_real_distribution<double> random(0.1, 1.0);
  for (int round = 0; round < 50; ++round) {
    const std::size_t devices = 2 + rng() % 3;
    std::vector<plan::BlockCost> blocks(devices + rng() % 4);
    for (auto& cost : blocks) cost = {.forward_fixed = random(rng), .forward_per_item = random(rng)};
    std::vector<double> speeds(devices);
    double mean = 0.0;
    for (double& speed : speeds) speed = random(rng);
    speeds[0] = 1.5;  // beyond noise
    for (const double speed : speeds) mean += speed / static_cast<double>(devices);
    std::vector<BlockSample> samples;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const std::size_t device :
           {b % devices, (b + 1) % devices}) {  // a chain: each device shares a block with the next
        for (const bool backward : {false, true}) {
          for (const std::int64_t items : {4, 8}) {
            samples.push_back(sample(blocks, b, device, speeds[device], backward, items));
          }
        }
      }
    }
    std::vector<plan::BlockCost> fitted(blocks.size(), {.parameter_bytes = 7});
    const BlockFit fit = fit_costs(samples, devices, fitted);
    for (std::size_t d = 0; d < devices; ++d) EXPECT_NEAR(fit.speeds[d], speeds[d] / mean, 1e-9);
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      EXPECT_NEAR(fitted[b].forward_fixed, blocks[b].forward_fixed / mean, 1e-9);
      EXPECT_NEAR(fitted[b].forward_per_item, blocks[b].forward_per_item / mean, 1e-9);
      EXPECT_NEAR(fitted[b].backward_fixed, 2.0 * blocks[b].forward_fixed / mean, 1e-9);
      EXPECT_NEAR(fitted[b].backward_per_item, 2.0 * blocks[b].forward_per_item / mean, 1e-9);
      EXPECT_EQ(fitted[b].parameter_bytes, 7) << "bytes are left alone";
    }
  }
}

TEST(BlockCosts, CountADeviceThatSharesNoBlockAsAverage) {
  const std::vector<plan::BlockCost> blocks(2, {.forward_per_item = 1.0});
  std::vector<plan::BlockCost> fitted = blocks;
  const std::vector<BlockSample> samples{sample(blocks, 0, 0, 1.0, false, 4), sample(blocks, 1, 1, 0.5, false, 4)};
  const BlockFit fit = fit_costs(samples, 3, fitted);
  EXPECT_EQ(fit.speeds, (std::vector<double>{1.0, 1.0, 1.0}));
  EXPECT_DOUBLE_EQ(fitted[1].forward_per_item, 2.0) << "of one size all of it counts per item";
}

TEST(BlockCosts, WeighTimesByTheirLengthWhenTheyCompareDevices) {
  std::vector<BlockSample> samples;
  for (std::size_t b = 0; b < 3; ++b) samples.insert(samples.end(), {{b, 0, false, 4, 1e-6}, {b, 1, false, 4, 1e-6}});
  for (const bool backward : {false, true}) {
    samples.insert(samples.end(), {{3, 0, backward, 4, 1.0}, {3, 1, backward, 4, 3.0}});
  }
  std::vector<plan::BlockCost> fitted(4);
  const BlockFit fit = fit_costs(samples, 2, fitted);
  EXPECT_DOUBLE_EQ(fit.speeds[0] / fit.speeds[1], 3.0);
}

TEST(BlockCosts, OfOneClassAreTheMedianOfItsBlocksAndOfItsMicroBatches) {
  std::vector<BlockSample> samples;
  const double seconds[] = {1.0, 9.0, 1.1};  // one of the blocks was held up
  for (std::size_t b = 0; b < 3; ++b) {
    for (const double factor : {0.9, 1.0, 5.0}) samples.push_back({b, 0, false, 2, factor * seconds[b]});
  }
  std::vector<plan::BlockCost> fitted(4);
  const std::vector<std::size_t> classes{0, 0, 0, 3};
  static_cast<void>(fit_costs(samples, 1, fitted, classes));
  for (std::size_t b = 0; b < 3; ++b) EXPECT_DOUBLE_EQ(fitted[b].forward_per_item, 0.55);
  EXPECT_DOUBLE_EQ(fitted[3].forward_per_item, 0.0);
}

TEST(BlockCosts, TakeDevicesAsEqualIfTheyDifferByNoMoreThanNoise) {
  std::vector<plan::BlockCost> fitted(1);
  const std::vector<BlockSample> samples{{0, 0, false, 4, 1.0}, {0, 1, false, 4, 1.04}};
  EXPECT_EQ(fit_costs(samples, 2, fitted).speeds, (std::vector<double>{1.0, 1.0}));
}

TEST(BlockCosts, AreNeverNegative) {
  std::vector<plan::BlockCost> fitted(2);
  const std::vector<BlockSample> samples{{0, 0, false, 4, 8.0},
                                         {0, 0, false, 8, 6.0},  // larger ones were faster
                                         {1, 0, false, 4, 1.0},
                                         {1, 0, false, 8, 6.0}};  // a line through these begins below 0
  static_cast<void>(fit_costs(samples, 1, fitted));
  EXPECT_DOUBLE_EQ(fitted[0].forward_per_item, 0.0);
  EXPECT_DOUBLE_EQ(fitted[0].forward_fixed, 7.0);
  EXPECT_DOUBLE_EQ(fitted[1].forward_fixed, 0.0);
  EXPECT_DOUBLE_EQ(fitted[1].forward_per_item, 3.5 / 6.0);
}

}  // namespace
}  // namespace paceline::internal

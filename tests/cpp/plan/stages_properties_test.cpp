// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <paceline/error.hpp>

#include "stage_brute_force.hpp"

namespace paceline::plan {
namespace {

using testing::StageCases;

TEST(StagesProperties, PlansAreAsQuickAsTheBestOfAllOrdersCutsDepthsAndMicroBatches) {
  StageCases cases(1);
  int infeasible = 0;
  int shortened = 0;
  for (int round = 0; round < 5000; ++round) {
    const StageProblem problem = cases.next(3, 4, 4);
    double best = std::numeric_limits<double>::infinity();
    testing::every_plan(problem, 1, problem.batch_size,
                        [&](const auto& cuts, const auto& order, std::int64_t count, const auto& depths) {
                          best = std::min(best, testing::simulate(schedule_of_depths(depths, count),
                                                                  testing::times_of(problem, cuts, order, count)));
                        });
    if (best == std::numeric_limits<double>::infinity()) {
      ++infeasible;
      ASSERT_THROW((void)plan_stages(problem), OutOfMemory) << "round " << round;
      continue;
    }
    const StagePlan plan = plan_stages(problem);
    ASSERT_NEAR(plan.seconds, best, 1e-9 * best) << "round " << round;
    const auto count = static_cast<std::int64_t>(plan.sizes.size());
    ASSERT_NEAR(testing::simulate(plan.schedule, testing::times_of(problem, plan.cuts, plan.order, count)), best,
                1e-9 * best);
    ASSERT_LE(plan.bound_seconds, plan.seconds * (1 + 1e-12));
    ASSERT_LE(plan.ideal_seconds, plan.seconds * (1 + 1e-12));
    for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
      const std::int64_t bytes =
          testing::bytes_of(problem, plan.cuts, plan.order, count, i, in_flight(plan.schedule, i));
      ASSERT_EQ(plan.bytes[i], bytes);
      ASSERT_LE(bytes, problem.devices[plan.order[i]].memory_bytes);
    }
    if (plan.cuts.size() < problem.devices.size()) ++shortened;
  }
  EXPECT_GT(infeasible, 100);
  EXPECT_GT(shortened, 100);
}

TEST(StagesProperties, PlansMoveTheFewestBytesOfAllThatAreAboutAsQuickAsTheBest) {
  StageCases cases(2);
  int moved = 0;
  for (int round = 0; round < 500; ++round) {
    const StageProblem problem = cases.next(3, 4, 3);
    StageOptions options{.indifference = cases.chance(0.3) ? 0.0 : cases.real(0.0, 0.5)};
    options.previous_order.push_back(static_cast<std::size_t>(cases.integer(0, 3)));
    options.previous_cuts.push_back(0);
    for (std::size_t cut = 1; cut < problem.blocks.size(); ++cut) {
      if (!cases.chance(0.5)) continue;
      options.previous_cuts.push_back(cut);
      options.previous_order.push_back(static_cast<std::size_t>(cases.integer(0, 3)));
    }
    const auto moves = [&](const auto& cuts, const auto& order) {
      std::int64_t bytes = 0;
      const auto device = [](const auto& firsts, const auto& devices, std::size_t block) {
        return devices[static_cast<std::size_t>(std::ranges::upper_bound(firsts, block) - firsts.begin()) - 1];
      };
      for (std::size_t block = 0; block < problem.blocks.size(); ++block) {
        const std::size_t now = device(cuts, order, block);
        const std::size_t before = device(options.previous_cuts, options.previous_order, block);
        if (before >= problem.devices.size() ||
            problem.devices[now].memory_space != problem.devices[before].memory_space)
          bytes += problem.blocks[block].parameter_bytes;
      }
      return bytes;
    };
    std::vector<std::pair<double, std::int64_t>> plans;
    double best = std::numeric_limits<double>::infinity();
    testing::every_plan(problem, 1, problem.batch_size,
                        [&](const auto& cuts, const auto& order, std::int64_t count, const auto& depths) {
                          plans.emplace_back(testing::simulate(schedule_of_depths(depths, count),
                                                               testing::times_of(problem, cuts, order, count)),
                                             moves(cuts, order));
                          best = std::min(best, plans.back().first);
                        });
    if (plans.empty()) continue;
    std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    for (const auto& [seconds, bytes] : plans)
      if (seconds <= best * (1.0 + std::max(options.indifference, 1e-9))) fewest = std::min(fewest, bytes);
    double quickest = std::numeric_limits<double>::infinity();
    for (const auto& [seconds, bytes] : plans)
      if (bytes == fewest) quickest = std::min(quickest, seconds);
    const StagePlan plan = plan_stages(problem, options);
    ASSERT_EQ(plan.moved_bytes, fewest) << "round " << round;
    ASSERT_EQ(moves(plan.cuts, plan.order), fewest);
    ASSERT_NEAR(plan.seconds, quickest, 1e-9 * quickest) << "round " << round;
    if (fewest > 0) ++moved;
  }
  EXPECT_GT(moved, 50);
}

}  // namespace
}  // namespace paceline::plan

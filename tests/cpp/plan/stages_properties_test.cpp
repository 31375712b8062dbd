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

}  // namespace
}  // namespace paceline::plan

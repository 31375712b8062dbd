// SPDX-License-Identifier: Apache-2.0
// The granularity that is chosen by the size of the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/plan/split.hpp>

#include "errors.hpp"

namespace paceline::balance {
namespace {

BalancerOptions chosen(std::size_t devices) {
  BalancerOptions options;
  options.granularity = 0;
  for (std::size_t d = 0; d < devices; ++d) options.devices.push_back({"cuda:" + std::to_string(d), "gpu", {}});
  return options;
}

std::int64_t granularity(std::size_t devices, std::int64_t batch_size) {
  return Balancer(chosen(devices)).next_plan(batch_size).granularity;
}

TEST(Granularity, IsAMultipleOfEightOrAPowerOfTwo) {
  EXPECT_EQ(granularity(2, 8192), 128);
  EXPECT_EQ(granularity(2, 1000), 8);
  EXPECT_EQ(granularity(4, 1000), 4);
  EXPECT_EQ(granularity(8, 256), 1);
  EXPECT_EQ(granularity(3, 1), 1);
}

TEST(Granularity, CostsLittleOfAStep) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> fixed(0.0, 5.0);
  for (const std::size_t devices : {2U, 4U, 8U}) {
    for (const double slowest : {1.05, 1.5, 3.0}) {
      std::uniform_real_distribution<double> per_item(1.0, slowest);
      double sum = 0.0;
      double most = 0.0;
      constexpr int kTimes = 200;
      for (int k = 0; k < kTimes; ++k) {
        const std::int64_t batch = std::uniform_int_distribution<std::int64_t>(64, 8192)(random);
        std::vector<plan::CostModel> models;
        for (std::size_t d = 0; d < devices; ++d)
          models.push_back(plan::CostModel::affine(fixed(random), per_item(random)));
        const double best = plan::split_batch(batch, models, {}).makespan_seconds;
        const plan::SplitOptions coarse{.granularity = granularity(devices, batch)};
        const double cost = plan::split_batch(batch, models, coarse).makespan_seconds / best - 1.0;
        sum += cost;
        most = std::max(most, cost);
      }
      EXPECT_LT(sum / kTimes, 0.008) << devices << " devices, up to " << slowest << " times slower";
      EXPECT_LT(most, 0.03) << devices << " devices, up to " << slowest << " times slower";
    }
  }
}

TEST(Granularity, LeavesFewSizesToSharesThatMove) {
  std::set<std::int64_t> sizes;
  std::mt19937 random(2);
  std::normal_distribution<double> drift(0.0, 0.02);
  Balancer balancer(chosen(2));
  double speed = 1.0;
  for (int step = 0; step < 500; ++step) {
    speed = std::clamp(speed + drift(random), 0.7, 1.4);
    const StepPlan plan = balancer.next_plan(2048);
    StepTimings timings;
    for (std::size_t d = 0; d < 2; ++d) {
      sizes.insert(plan.shares[d]);
      EXPECT_EQ(plan.shares[d] % 32, 0);
      const double seconds = 0.001 * static_cast<double>(plan.shares[d]) / (d == 0 ? speed : 1.0);
      timings.devices.push_back({{plan.shares[d], seconds}});
    }
    balancer.record(timings);
  }
  EXPECT_GT(balancer.move_count(), 5);
  EXPECT_LE(sizes.size(), 24U);
}

TEST(Granularity, IsSaidInTheExplanation) {
  Balancer balancer(chosen(2));
  balancer.next_plan(1024);
  EXPECT_EQ(balancer.report().granularity, 16);
  EXPECT_TRUE(says(balancer.explain(), "shares of a batch of 1024, as planned, in multiples of 16"));
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/item_work.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <paceline/engine/step.hpp>
#include <paceline/error.hpp>

namespace paceline::internal {
namespace {

/// The loop that a step with costs goes through.
struct Loop {
  balance::Balancer balancer;
  ItemWork work;

  std::shared_ptr<const BatchPlan> next(const std::vector<double>& costs) {
    check_costs(costs);
    return work.arrange(costs, balancer.next_plan(work.begin(costs)), 1);
  }
  void record(const BatchPlan& plan, const StepRecord& record) {
    balancer.record(plan.timings(record));
    work.record(plan, record, balancer);
  }
};

Loop loop_of(const std::vector<std::string>& classes) {
  balance::BalancerOptions options;
  options.proportional = true;
  PerDevice<std::string> by_id;  // of a group that others have left
  for (std::size_t i = 0; i < classes.size(); ++i) {
    options.devices.push_back({classes[i] + ":" + std::to_string(i), classes[i], {}});
    by_id.add(DeviceId(3 * i + 2), classes[i]);
  }
  return {balance::Balancer(options), ItemWork(by_id, 0, false)};
}

/// What the balancer is asked for, for a batch that costs `cost` in all.
std::int64_t size_of(Loop& loop, double cost) {
  return loop.next(std::vector<double>(8, cost / 8.0))->balance.batch_size;
}

TEST(ItemWork, TellsTheBalancerOneTimeForOneShareAndThatNothingOfItIsFixed) {
  Loop loop = loop_of({"host", "host"});
  for (int step = 0; step < 20; ++step) {
    const auto plan = loop.next(std::vector<double>{4, 3, 2, 2, 1, 1});
    StepRecord record;
    for (std::size_t d = 0; d < 2; ++d) {
      const std::int64_t begin = d == 0 ? 0 : plan->shares[0];
      record.claims.push_back({{.begin = begin, .end = begin + plan->shares[d], .device = plan->devices[d]}, 0.0, 1.0});
    }
    record.compute_seconds = 1.0;
    for (const auto& device : plan->timings(record).devices) EXPECT_EQ(device.size(), 1U);
    loop.record(*plan, record);
  }
  for (const balance::DeviceReport& device : loop.balancer.report().devices) {
    EXPECT_EQ(device.fixed_seconds, 0.0);
    EXPECT_EQ(device.fixed_error, 0.0);
  }
}

TEST(ItemWork, HasTwoBatchSizesForEachDoublingOfCostsAtMost) {
  std::mt19937_64 rng(2);
  std::uniform_real_distribution<double> exponent(0.0, 6.0);
  Loop loop = loop_of({"host", "host"});
  const double unit = static_cast<double>(size_of(loop, 8.0)) / 8.0;
  std::set<std::int64_t> sizes;
  for (int step = 0; step < 500; ++step) {
    const double cost = std::exp2(exponent(rng));
    const std::int64_t size = size_of(loop, cost);
    EXPECT_LE(std::abs(std::log2(static_cast<double>(size) / (unit * cost))), 0.5 + 1e-6);
    sizes.insert(size);
  }
  EXPECT_LE(sizes.size(), 13U);
  EXPECT_GE(sizes.size(), 6U) << "they still differ";
}

TEST(ItemWork, StaysWithTheLastBatchSizeNearABorder) {
  Loop loop = loop_of({"host", "host"});
  const std::int64_t low = size_of(loop, 100.0);
  EXPECT_EQ(size_of(loop, 140.0), low);
  const std::int64_t high = size_of(loop, 190.0);
  EXPECT_GT(high, low);
  EXPECT_EQ(size_of(loop, 138.0), high) << "the other one is as near, but no batch shall change its size by noise";
  EXPECT_EQ(size_of(loop, 100.0), low);
  EXPECT_EQ(size_of(loop, 140.0), low);
}

TEST(ItemWork, TellsTheSizeOfABatchBeforeItIsPlanned) {
  Loop loop = loop_of({"host", "host"});
  for (const double cost : {3.0, 4.0, 100.0, 5.0, 1e-15, 0.0, 1e30, 3.0}) {
    const std::vector<double> costs(8, cost / 8.0);
    const std::int64_t told = loop.work.batch_units(costs);
    EXPECT_EQ(loop.next(costs)->balance.batch_size, told) << "for " << cost;
  }
  EXPECT_THROW((void)loop.next(std::vector<double>{-1.0}), InvalidArgument);
}

TEST(ItemWork, TellsEachDeviceClassByItsName) {
  const std::vector<std::string> classes = {"quick", "slow"};
  Loop loop = loop_of(classes);
  std::mt19937_64 rng(3);
  std::uniform_real_distribution<double> length(1.0, 9.0);
  for (int step = 0; step < 12; ++step) {
    std::vector<double> costs(64);
    for (double& cost : costs) cost = length(rng);
    const auto plan = loop.next(costs);
    StepRecord record;
    for (std::size_t device = 0; device < classes.size(); ++device) {
      const auto& [order, bounds, first, work] = plan->arrangement;
      for (std::size_t k = first[device]; k < first[device + 1]; ++k) {
        const double longest = plan->ordered_costs[static_cast<std::size_t>(bounds[k])];
        const auto count = static_cast<double>(bounds[k + 1] - bounds[k]);
        ClaimRecord claim;
        claim.micro_batch = {.begin = bounds[k], .end = bounds[k + 1], .device = plan->devices[device]};
        claim.finish_seconds = 1e-3 * static_cast<double>(device + 1) * longest * count;
        record.claims.push_back(claim);
      }
    }
    loop.record(*plan, record);
  }
  const std::string told = loop.work.explain();
  for (const std::string& name : classes) {
    EXPECT_NE(told.find("  on " + name + ", a micro-batch takes "), std::string::npos) << told;
  }
  EXPECT_TRUE(loop.work.report().device_class == "quick" || loop.work.report().device_class == "slow");
}

TEST(ItemWork, CostsOfAnySizeAreBatchSizesThatCanBeSplit) {
  Loop loop = loop_of({"host", "host"});
  size_of(loop, 1.0);
  EXPECT_EQ(size_of(loop, 1e-12), 1000);
  EXPECT_EQ(size_of(loop, 1e-15), 1000);
  const std::int64_t most = size_of(loop, 1e30);
  EXPECT_EQ(size_of(loop, 1e60), most);
  EXPECT_EQ(size_of(loop, 1.0), 1000000);
}

}  // namespace
}  // namespace paceline::internal

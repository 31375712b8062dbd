// SPDX-License-Identifier: Apache-2.0
#include "engine/item_planner.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <paceline/engine/step.hpp>
#include <paceline/error.hpp>

namespace paceline::engine {
namespace {

ItemPlanner planner_of(std::size_t devices) {
  balance::BalancerOptions options;
  options.proportional = true;
  for (std::size_t i = 0; i < devices; ++i) options.devices.push_back({"host:" + std::to_string(i), "host", {}});
  return {balance::Balancer(options), std::vector<std::string>(devices, "host"), 0};
}

/// The size that the balancer gets for a batch of total cost `cost`.
std::int64_t size_of(ItemPlanner& planner, double cost) {
  return planner.next(std::vector<double>(8, cost / 8.0))->balance.batch_size;
}

TEST(ItemPlanner, TheFirstBatchHasAMillionUnits) {
  ItemPlanner planner = planner_of(2);
  EXPECT_EQ(size_of(planner, 37.0), 1000000);
}

TEST(ItemPlanner, TellsTheBalancerOneTimeForOneShareAndThatNothingOfItIsFixed) {
  ItemPlanner planner = planner_of(2);
  for (int step = 0; step < 20; ++step) {
    const auto plan = planner.next(std::vector<double>{4, 3, 2, 2, 1, 1});
    StepRecord record;
    for (std::size_t d = 0; d < 2; ++d) {
      const std::int64_t begin = d == 0 ? 0 : plan->item_shares[0];
      record.claims.push_back({{.begin = begin, .end = begin + plan->item_shares[d], .device_index = d}, 0.0, 1.0});
    }
    record.compute_seconds = 1.0;
    for (const auto& device : plan->timings(record).devices) EXPECT_EQ(device.size(), 1U);
    planner.record(*plan, record, true);
  }
  for (const balance::DeviceReport& device : planner.balancer().report().devices) {
    EXPECT_EQ(device.fixed_seconds, 0.0);
    EXPECT_EQ(device.fixed_error, 0.0);
  }
}

TEST(ItemPlanner, CostsThatAlternateAreTwoBatchSizes) {
  ItemPlanner planner = planner_of(2);
  std::mt19937_64 rng(1);
  std::uniform_real_distribution<double> vary(0.9, 1.1);
  std::set<std::int64_t> sizes;
  for (int step = 0; step < 100; ++step) {
    sizes.insert(size_of(planner, 100.0 * vary(rng)));
    sizes.insert(size_of(planner, 200.0 * vary(rng)));
  }
  EXPECT_EQ(sizes.size(), 2U);
}

TEST(ItemPlanner, HasTwoBatchSizesForEachDoublingOfCostsAtMost) {
  std::mt19937_64 rng(2);
  std::uniform_real_distribution<double> exponent(0.0, 6.0);
  ItemPlanner planner = planner_of(2);
  const double unit = static_cast<double>(size_of(planner, 8.0)) / 8.0;
  std::set<std::int64_t> sizes;
  for (int step = 0; step < 500; ++step) {
    const double cost = std::exp2(exponent(rng));
    const std::int64_t size = size_of(planner, cost);
    EXPECT_LE(std::abs(std::log2(static_cast<double>(size) / (unit * cost))), 0.5 + 1e-6);
    sizes.insert(size);
  }
  EXPECT_LE(sizes.size(), 13U);
  EXPECT_GE(sizes.size(), 6U) << "they still differ";
}

TEST(ItemPlanner, StaysWithTheLastBatchSizeNearABorder) {
  ItemPlanner planner = planner_of(2);
  const std::int64_t low = size_of(planner, 100.0);
  EXPECT_EQ(size_of(planner, 140.0), low);
  const std::int64_t high = size_of(planner, 190.0);
  EXPECT_GT(high, low);
  EXPECT_EQ(size_of(planner, 138.0), high) << "the other one is as near, but no batch shall change its size by noise";
  EXPECT_EQ(size_of(planner, 100.0), low);
  EXPECT_EQ(size_of(planner, 140.0), low);
}

TEST(ItemPlanner, TellsTheSizeOfABatchBeforeItIsPlanned) {
  ItemPlanner planner = planner_of(2);
  for (const double cost : {3.0, 4.0, 100.0, 5.0, 1e-15, 0.0, 1e30, 3.0}) {
    const std::vector<double> costs(8, cost / 8.0);
    const std::int64_t units = planner.batch_units(costs);
    EXPECT_EQ(planner.next(costs)->balance.batch_size, units) << "for " << cost;
  }
  EXPECT_THROW((void)planner.next(std::vector<double>{-1.0}), InvalidArgument);
}

TEST(ItemPlanner, TellsEachDeviceClassByItsName) {
  balance::BalancerOptions options;
  const std::vector<std::string> classes = {"quick", "slow"};
  for (const std::string& name : classes) options.devices.push_back({name + ":0", name, {}});
  ItemPlanner planner(balance::Balancer(options), classes, 0);
  std::mt19937_64 rng(3);
  std::uniform_real_distribution<double> length(1.0, 9.0);
  for (int step = 0; step < 12; ++step) {
    std::vector<double> costs(64);
    for (double& cost : costs) cost = length(rng);
    const auto plan = planner.next(costs);
    StepRecord record;
    for (std::size_t device = 0; device < classes.size(); ++device) {
      const auto& [order, bounds, first, work] = plan->arrangement;
      for (std::size_t k = first[device]; k < first[device + 1]; ++k) {
        const double longest = plan->ordered_costs[static_cast<std::size_t>(bounds[k])];
        const auto count = static_cast<double>(bounds[k + 1] - bounds[k]);
        ClaimRecord claim;
        claim.micro_batch = {.begin = bounds[k], .end = bounds[k + 1], .device_index = device};
        claim.finish_seconds = 1e-3 * static_cast<double>(device + 1) * longest * count;
        record.claims.push_back(claim);
      }
    }
    planner.record(*plan, record, true);
  }
  const std::string text = planner.explain();
  for (const std::string& name : classes) {
    EXPECT_NE(text.find("  on " + name + ", a micro-batch takes "), std::string::npos) << text;
  }
  EXPECT_TRUE(planner.report().device_class == "quick" || planner.report().device_class == "slow");
}

TEST(ItemPlanner, CostsOfAnySizeAreBatchSizesThatCanBeSplit) {
  ItemPlanner planner = planner_of(2);
  size_of(planner, 1.0);
  EXPECT_EQ(size_of(planner, 1e-12), 1000);
  EXPECT_EQ(size_of(planner, 1e-15), 1000);
  const std::int64_t most = size_of(planner, 1e30);
  EXPECT_EQ(size_of(planner, 1e60), most);
  EXPECT_EQ(size_of(planner, 1.0), 1000000);
}

}  // namespace
}  // namespace paceline::engine

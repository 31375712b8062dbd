// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/block_costs.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace paceline::internal {
namespace {

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

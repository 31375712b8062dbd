// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>
#include <random>
#include <vector>

#include <paceline/plan/hold_back.hpp>

namespace paceline::plan {
namespace {

const CostModel kModel = CostModel::affine(1e-3, 1e-4);

TEST(HoldBack, HoldsNothingBackOnAQuietMachine) {
  const std::vector<std::int64_t> shares{256, 256};
  const HoldBackPlan plan = plan_hold_back(shares, std::vector(2, kModel), std::vector(2, 0.005));
  EXPECT_EQ(plan.first_chunks, shares);
  EXPECT_EQ(plan.pool, 0);
}

TEST(HoldBack, HoldsBackMoreTheMoreADeviceVaries) {
  const std::vector<std::int64_t> shares{340, 172};
  const HoldBackPlan plan = plan_hold_back(shares, std::vector{kModel, kModel.scaled(2.0)}, std::vector{0.02, 0.16});
  EXPECT_GT(plan.pool, 0);
  EXPECT_GT(172 - plan.first_chunks[1], 2 * (340 - plan.first_chunks[0]));
}

TEST(HoldBack, HoldsNothingBackWhereACorrectionCostsMoreThanItRecovers) {
  const std::vector<std::int64_t> shares{256, 256};
  const std::vector models(2, CostModel::affine(1e-3, 1e-4));  // shares of 26.6 ms
  const auto pool = [&](double noise) { return plan_hold_back(shares, models, std::vector(2, noise)).pool; };
  // Two normal finishes with deviation s: the later one is s / sqrt(pi) after their mean.
  const double even_odds = 1e-3 * std::sqrt(std::numbers::pi) / models[0].seconds(256);
  EXPECT_EQ(pool(0.99 * even_odds), 0);
  EXPECT_GT(pool(1.01 * even_odds), 0);
}

TEST(HoldBack, HoldsNothingBackBeforeAnythingIsMeasuredOrForASingleDevice) {
  const std::vector<std::int64_t> shares{5, 0, 6};
  EXPECT_EQ(plan_hold_back(shares, {}, {}).first_chunks, shares);
  const std::vector<std::int64_t> one{0, 512};
  EXPECT_EQ(plan_hold_back(one, std::vector(2, kModel), std::vector(2, 0.3)).pool, 0);
}

TEST(HoldBack, KeepsEveryItemAndTheGranularityOfWhatIsHeldBack) {
  std::mt19937_64 rng(3);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t count = 1 + rng() % 6;
    const std::int64_t granularity = 1 + static_cast<std::int64_t>(rng() % 8);
    std::vector<std::int64_t> shares(count);
    std::vector<CostModel> models;
    std::vector<double> noise(count);
    for (std::size_t d = 0; d < count; ++d) {
      shares[d] = static_cast<std::int64_t>(rng() % 300);
      noise[d] = static_cast<double>(rng() % 300) / 1000.0;
      models.push_back(CostModel::affine(static_cast<double>(rng() % 100) * 1e-5, 1e-4));
    }
    const HoldBackPlan plan = plan_hold_back(shares, models, noise, granularity);
    std::int64_t pool = 0;
    for (std::size_t d = 0; d < count; ++d) {
      const std::int64_t held = shares[d] - plan.first_chunks[d];
      EXPECT_GE(plan.first_chunks[d], 0);
      EXPECT_GE(held, 0);
      EXPECT_EQ(held % granularity, 0);
      pool += held;
    }
    EXPECT_EQ(pool, plan.pool);
  }
}

}  // namespace
}  // namespace paceline::plan

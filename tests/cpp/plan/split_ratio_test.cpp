// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::plan {
namespace {

using Shares = std::vector<std::int64_t>;

TEST(WeightedSplit, FollowsTheRatios) {
  EXPECT_EQ(split_weighted(512, std::array{2.0, 1.0}), (Shares{341, 171}));
  EXPECT_EQ(split_weighted(10, std::array{1.0, 0.0, 4.0}), (Shares{2, 0, 8}));
}

TEST(WeightedSplit, GivesWhatIsLeftToTheLargestRemainderAndOnATieToTheLowerIndex) {
  EXPECT_EQ(split_weighted(10, std::array{1.0, 1.0, 1.0}), (Shares{4, 3, 3}));
  EXPECT_EQ(split_weighted(10, std::array{0.14, 0.57, 0.29}), (Shares{1, 6, 3}));
}

TEST(WeightedSplit, IsWithinOneItemOfTheQuotaAndKeepsZeros) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(-12.0, 12.0);
  for (int round = 0; round < 5000; ++round) {
    std::vector<double> weights(1 + random() % 12);
    for (double& weight : weights) weight = random() % 4 == 0 ? 0.0 : std::pow(10.0, exponent(random) * (round % 2));
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (sum == 0.0) continue;
    const auto batch_size = static_cast<std::int64_t>(random() % 10'000);
    const Shares shares = split_weighted(batch_size, weights);
    ASSERT_EQ(std::accumulate(shares.begin(), shares.end(), std::int64_t{0}), batch_size);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      ASSERT_GE(shares[i], 0);
      ASSERT_TRUE(weights[i] > 0.0 || shares[i] == 0);
      ASSERT_LT(std::abs(static_cast<double>(shares[i]) - static_cast<double>(batch_size) * weights[i] / sum),
                1.0 + 1e-6);
    }
  }
}

TEST(WeightedSplit, SurvivesWeightsWhoseSumOverflows) {
  EXPECT_EQ(split_weighted(4, std::array{1.7e308, 1.7e308}), (Shares{2, 2}));
  EXPECT_EQ(split_weighted(4, std::array{5e-324, 5e-324}), (Shares{2, 2}));
}

TEST(WeightedSplit, RefusesWeightsThatAreNoRatio) {
  EXPECT_THROW((void)split_weighted(4, std::array{1.0, -1.0}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(4, std::array{1.0, std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(4, std::array{0.0, 0.0}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(4, {}), InvalidArgument);
  EXPECT_THROW((void)split_weighted(-4, std::array{1.0}), InvalidArgument);
}

TEST(EvenSplit, DiffersByAtMostOneItemTheLargerSharesFirst) {
  EXPECT_EQ(split_even(10, 4), (Shares{3, 3, 2, 2}));
  EXPECT_EQ(split_even(2, 4), (Shares{1, 1, 0, 0}));
  EXPECT_EQ(split_even(0, 2), (Shares{0, 0}));
}

TEST(EvenSplit, RefusesNoDevicesAndNegativeBatches) {
  EXPECT_THROW((void)split_even(4, 0), InvalidArgument);
  EXPECT_THROW((void)split_even(-1, 2), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan

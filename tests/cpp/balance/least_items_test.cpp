// SPDX-License-Identifier: Apache-2.0
//
// Shares that are zero or large enough: for every policy and every small batch, while speeds are learned and change.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/error.hpp>

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

BalancerOptions options_of(Balance policy, std::size_t devices, std::int64_t granularity = 1) {
  BalancerOptions options;
  options.policy = policy;
  options.granularity = granularity;
  for (std::size_t i = 0; i < devices; ++i) {
    options.devices.push_back({"host:" + std::to_string(i), "host", {}});
    if (policy == Balance::weighted) options.weights.push_back(static_cast<double>(1 + 3 * i));
  }
  return options;
}

/// Plans and records one step on devices with these speeds.
Shares step(Balancer& balancer, std::int64_t batch_size, const std::vector<double>& speeds, std::mt19937_64& random) {
  const Shares shares = balancer.next_plan(batch_size).shares;
  StepTimings timings;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    auto& runs = timings.devices.emplace_back();
    const double noise = std::uniform_real_distribution<double>(0.8, 1.2)(random);
    const double seconds = noise * (1e-4 + 1e-3 * static_cast<double>(shares[i])) / speeds[i];
    if (shares[i] > 0) runs.push_back({shares[i], seconds});
  }
  balancer.record(timings);
  return shares;
}

void expect_large_enough(const Shares& shares, std::int64_t batch_size, std::int64_t least) {
  ASSERT_EQ(std::accumulate(shares.begin(), shares.end(), std::int64_t{0}), batch_size);
  for (const std::int64_t share : shares) {
    ASSERT_TRUE(share == 0 || share >= std::min(least, batch_size)) << share;
  }
}

TEST(LeastItems, NoShareIsSmallerWhateverTheBatchThePolicyAndTheSpeeds) {
  std::mt19937_64 random(1);
  for (const Balance policy : {Balance::even, Balance::weighted, Balance::automatic}) {
    for (std::size_t devices = 1; devices <= 4; ++devices) {
      for (const std::int64_t granularity : {1, 2, 3}) {
        for (std::int64_t batch_size = 1; batch_size <= 40; ++batch_size) {
          SCOPED_TRACE(::testing::Message()
                       << name_of(policy) << " " << devices << " " << granularity << " " << batch_size);
          const std::int64_t least = 2 + batch_size % 2;
          Balancer balancer(options_of(policy, devices, granularity));
          balancer.set_least_items(least);
          std::vector<double> speeds;
          for (std::size_t i = 0; i < devices; ++i) speeds.push_back(0.2 + static_cast<double>(random() % 8));
          for (int k = 0; k < 12; ++k) {
            if (k == 6) speeds[0] /= 4.0;
            // Now and then the short last batch of an epoch.
            const std::int64_t now = k % 4 == 3 ? 1 + batch_size / 2 : batch_size;
            ASSERT_NO_FATAL_FAILURE(expect_large_enough(step(balancer, now, speeds, random), now, least));
          }
        }
      }
    }
  }
}

TEST(LeastItems, AnyShareWillDoOnceMore) {
  Balancer balancer(options_of(Balance::even, 3));
  balancer.set_least_items(2);
  EXPECT_EQ(balancer.next_plan(3).shares, (Shares{3, 0, 0}));
  EXPECT_EQ(balancer.next_plan(5).shares, (Shares{3, 2, 0}));
  EXPECT_EQ(balancer.next_plan(1).shares, (Shares{1, 0, 0}));
  balancer.set_least_items(1);
  EXPECT_EQ(balancer.next_plan(1).shares, (Shares{1, 0, 0}));
  EXPECT_EQ(balancer.next_plan(3).shares, (Shares{1, 1, 1}));
  EXPECT_THROW(balancer.set_least_items(0), InvalidArgument);
}

TEST(LeastItems, SharesInForceThatBecomeTooSmallArePlannedAnew) {
  std::mt19937_64 random(2);
  Balancer balancer(options_of(Balance::automatic, 2));
  for (int k = 0; k < 40; ++k) step(balancer, 8, {5.0, 1.0}, random);
  const Shares before = step(balancer, 8, {5.0, 1.0}, random);
  ASSERT_EQ(*std::min_element(before.begin(), before.end()), 1) << "or the rest says nothing";
  balancer.set_least_items(2);
  for (int k = 0; k < 40; ++k) expect_large_enough(step(balancer, 8, {5.0, 1.0}, random), 8, 2);
}

TEST(LeastItems, LargeSharesAreThoseOfABalancerWithoutThem) {
  std::mt19937_64 random(3);
  std::mt19937_64 same(3);
  Balancer balancer(options_of(Balance::automatic, 4));
  Balancer other(options_of(Balance::automatic, 4));
  other.set_least_items(2);
  for (int k = 0; k < 200; ++k) {
    // One device should get more than twice an even share, which takes two moves.
    const std::vector<double> speeds{1.0, k < 100 ? 1.0 : 0.4, 9.0, 1.0};
    ASSERT_EQ(step(balancer, 512, speeds, random), step(other, 512, speeds, same)) << "step " << k;
  }
  EXPECT_GT(balancer.move_count(), 0);
}

}  // namespace
}  // namespace paceline::balance

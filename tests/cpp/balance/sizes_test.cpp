// SPDX-License-Identifier: Apache-2.0
//
// Sizes of shares and micro-batches: granularity, the least items, and the search for a faster size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/size_search.hpp>
#include <paceline/error.hpp>
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

using ItemSeconds = std::function<double(std::int64_t)>;  // of an item, in a micro-batch of so many items

std::vector<TimedPiece> timed(const SizeSearch& search, std::int64_t begin, std::int64_t items,
                              const ItemSeconds& seconds, const std::function<double()>& noise) {
  std::vector<TimedPiece> pieces;
  std::int64_t at = begin;
  for (const auto& [first, last] : search.pieces(begin, begin + items)) {
    EXPECT_EQ(first, at);
    at = last;
    pieces.push_back({last - first, static_cast<double>(last - first) * seconds(last - first) * noise()});
  }
  EXPECT_EQ(at, begin + items);
  return pieces;
}

void steps(SizeSearch& search, const Shares& shares, const ItemSeconds& seconds, int count, double noise = 0.0,
           unsigned seed = 1) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  for (int step = 0; step < count; ++step) {
    std::vector<TimedClaims> devices;
    for (const std::int64_t share : shares) {
      devices.emplace_back();
      if (share == 0) continue;
      devices.back().push_back(timed(search, 0, share, seconds, [&] { return 1.0 + noise * normal(rng); }));
    }
    search.add(devices);
  }
}

double falling_out_of_a_cache(std::int64_t items) {
  return (items <= 200 ? 1e-4 : 2e-4) + 1e-4 / static_cast<double>(items);
}

TEST(SizeSearch, FindsTheLargestSizeThatFitsInThirteenSteps) {
  SizeSearch search;
  steps(search, {2048, 2048}, falling_out_of_a_cache, 13);
  EXPECT_EQ(search.size(), 128);
  EXPECT_NEAR(search.gain(), falling_out_of_a_cache(2048) / falling_out_of_a_cache(128), 1e-9);
  using Spans = std::vector<std::pair<std::int64_t, std::int64_t>>;
  EXPECT_EQ(search.pieces(10, 266), (Spans{{10, 138}, {138, 266}}));
}

TEST(SizeSearch, FindsItForUnequalShares) {
  for (const Shares& shares : {Shares{2048, 1000}, Shares{2048, 0}, Shares{700, 1500, 300}}) {
    SizeSearch search;
    steps(search, shares, falling_out_of_a_cache, 13, 0.05);
    ASSERT_TRUE(search.size()) << shares.size();
    EXPECT_GE(*search.size(), 64);
    EXPECT_LE(*search.size(), 200);
  }
}

TEST(SizeSearch, FindsItWhateverHalvesLeaveOver) {
  for (const std::int64_t share : {9, 17, 100, 131, 200}) {
    SizeSearch search;
    steps(search, {share, share}, [&](std::int64_t items) { return 2 * items <= share + 1 ? 1e-2 : 2e-2; }, 13);
    EXPECT_EQ(search.size(), (share + 1) / 2);
    EXPECT_NEAR(search.gain(), 2.0, 1e-9);
  }
}

TEST(SizeSearch, DoesNotLetCorrectionsBlurWhatWholeClaimsTell) {
  SizeSearch search;
  for (int step = 0; step < 13; ++step) {
    TimedClaims claims;
    for (const auto& [begin, share] : {std::pair<std::int64_t, std::int64_t>{0, 1800}, {2048, 248}}) {
      claims.push_back(timed(search, begin, share, falling_out_of_a_cache, [] { return 1.0; }));
    }
    search.add({claims});
  }
  ASSERT_TRUE(search.size());
  EXPECT_GE(*search.size(), 64);
  EXPECT_LE(*search.size(), 200);
}

TEST(SizeSearch, MeasuresUntilItIsCertainWhereTimesVary) {
  int found = 0;
  int found_wrongly = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    SizeSearch faster;
    steps(faster, {2048, 2048}, [](std::int64_t items) { return items <= 1024 ? 1e-4 : 1.25e-4; }, 60, 0.1, seed);
    found += faster.size() ? 1 : 0;
    SizeSearch alike;
    steps(alike, {2048, 2048}, [](std::int64_t) { return 1e-4; }, 60, 0.1, seed);
    found_wrongly += alike.size() ? 1 : 0;
  }
  EXPECT_EQ(found, 400);
  EXPECT_LE(found_wrongly, 16) << "of 400: 2 % were measured over 4000 seeds";
}

TEST(SizeSearch, LeavesSizesAloneThatAreNoFaster) {
  SizeSearch search;
  steps(search, {2048, 2048}, [](std::int64_t items) { return 1e-4 + 1e-3 / static_cast<double>(items); }, 2000, 0.05);
  EXPECT_FALSE(search.size());
}

TEST(SizeSearch, NeverTriesSmallMicroBatches) {
  SizeSearch search;
  std::set<std::int64_t> sizes;
  steps(
      search, {400, 400},
      [&](std::int64_t items) {
        sizes.insert(items);
        return 1e-4;
      },
      30);
  EXPECT_EQ(sizes, (std::set<std::int64_t>{400, 200, 100, 50})) << "the smallest one takes 5 ms";
}

TEST(SizeSearch, RunsMostStepsAsUsual) {
  SizeSearch search;
  int trials = 0;
  for (int step = 0; step < 1000; ++step) {
    trials += search.on_trial() ? 1 : 0;
    steps(search, {2048}, falling_out_of_a_cache, 1);
  }
  EXPECT_EQ(trials, 4 + 8) << "of sizes in each of two searches, and of whole claims in the second";
}

TEST(SizeSearch, GivesASizeUpWhenAnotherIsFaster) {
  SizeSearch search;
  steps(search, {2048}, falling_out_of_a_cache, 13);
  EXPECT_EQ(search.size(), 128);
  const auto costly_calls = [](std::int64_t items) {
    return 1e-4 + (items <= 1024 ? 4e-2 / static_cast<double>(items) : 1e-4);
  };
  steps(search, {2048}, costly_calls, 600);
  EXPECT_EQ(search.size(), 1024);
}

TEST(SizeSearch, GoesBackToWholeClaimsWhereTheyAreFasterAndLeavesThemAgain) {
  SizeSearch search;
  const auto costly_calls = [](std::int64_t items) { return 1e-4 + 4e-2 / static_cast<double>(items); };
  steps(search, {2048, 1000}, falling_out_of_a_cache, 13, 0.02);
  EXPECT_TRUE(search.size());
  steps(search, {2048, 1000}, costly_calls, 600, 0.02);
  EXPECT_FALSE(search.size());
  EXPECT_EQ(search.pieces(0, 2048).size(), 1U);
  steps(search, {2048, 1000}, falling_out_of_a_cache, 600, 0.02);
  EXPECT_TRUE(search.size());
}

TEST(SizeSearch, CutsAClaimIntoEqualPieces) {
  for (std::int64_t items = 1; items < 60; ++items) {
    for (const std::int64_t size : {1, 3, 10, 100}) {
      const auto pieces = in_pieces(5, 5 + items, size);
      EXPECT_EQ(pieces.back().second, 5 + items);
      std::int64_t shortest = items;
      std::int64_t longest = 0;
      for (std::size_t k = 0; k < pieces.size(); ++k) {
        EXPECT_EQ(pieces[k].first, k == 0 ? 5 : pieces[k - 1].second);
        shortest = std::min(shortest, pieces[k].second - pieces[k].first);
        longest = std::max(longest, pieces[k].second - pieces[k].first);
      }
      EXPECT_LE(longest - shortest, 1);
      EXPECT_LE(2 * longest, std::max<std::int64_t>(3 * size, 2) + 2);
    }
  }
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/size_search.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <vector>

namespace paceline::balance {
namespace {

using ItemSeconds = std::function<double(std::int64_t)>;  // of an item, in a micro-batch of so many items
using Shares = std::vector<std::int64_t>;

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

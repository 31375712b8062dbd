// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include <paceline/error.hpp>
#include <paceline/plan/chunks.hpp>

namespace paceline::plan {
namespace {

using Sizes = std::vector<std::int64_t>;

TEST(Chunks, AreOneMicroBatchByDefault) {
  EXPECT_EQ(chunks(341), (Sizes{341}));
  EXPECT_EQ(chunks(0), Sizes{});
}

TEST(Chunks, OfAFixedSizeAreEqualButTheLast) {
  EXPECT_EQ(chunks(100, {.fixed_size = 32}), (Sizes{32, 32, 32, 4}));
  EXPECT_EQ(chunks(64, {.fixed_size = 32, .granularity = 16}), (Sizes{32, 32}));
}

TEST(FittingPiece, LeavesNothingBelowTheLeastAndIsTheNearestToWhatIsWanted) {
  for (std::int64_t left = 1; left <= 20; ++left) {
    for (std::int64_t least = 1; least <= 4; ++least) {
      for (std::int64_t wanted = 0; wanted <= 22; ++wanted) {
        const std::int64_t size = fitting_piece(wanted, left, least);
        SCOPED_TRACE(testing::Message() << wanted << " of " << left << ", least " << least);
        ASSERT_GE(size, std::min(left, least));
        ASSERT_TRUE(size == left || left - size >= least);
        if (wanted >= left) {
          EXPECT_EQ(size, left);
          continue;
        }
        for (std::int64_t other = least; other <= left - least; ++other) {
          EXPECT_LE(std::abs(size - wanted), std::abs(other - wanted));
        }
      }
    }
  }
}

TEST(FittingPiece, CutsAShareWithoutARemainderOfOne) {
  EXPECT_EQ(fitting_piece(4, 9, 2), 4);
  EXPECT_EQ(fitting_piece(4, 5, 2), 3);
  EXPECT_EQ(fitting_piece(4, 2, 2), 2);
  EXPECT_EQ(fitting_piece(2, 3, 2), 3) << "there is no other way";
}

TEST(Chunks, StartLargeAndThenHalve) {
  EXPECT_EQ(chunks(256, {.correction_fraction = 0.25, .floor = 8}), (Sizes{192, 32, 16, 8, 8}));
  EXPECT_EQ(chunks(250, {.correction_fraction = 0.2, .floor = 5, .granularity = 8}), (Sizes{202, 16, 16, 8, 8}));
}

TEST(Chunks, HoldNothingBackThatIsSmallerThanTheFloor) {
  EXPECT_EQ(chunks(100, {.correction_fraction = 0.1, .floor = 16}), (Sizes{100}));
}

TEST(Chunks, SumToTheShareInFewSizesNoneBelowTheFloor) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20'000; ++round) {
    const auto share = static_cast<std::int64_t>(random() % 100'000);
    const ChunkOptions options{.correction_fraction = static_cast<double>(random() % 1000) / 1000.0,
                               .floor = 1 + static_cast<std::int64_t>(random() % 100),
                               .granularity = 1 + static_cast<std::int64_t>(random() % 32)};
    const Sizes sizes = chunks(share, options);
    ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), share);
    if (share == 0) continue;
    ASSERT_GE(sizes.front(), 1);
    const std::int64_t unit = (options.floor + options.granularity - 1) / options.granularity * options.granularity;
    for (std::size_t i = 1; i < sizes.size(); ++i) {
      ASSERT_EQ(sizes[i] % unit, 0);
      ASSERT_TRUE(std::has_single_bit(static_cast<std::uint64_t>(sizes[i] / unit)));
      ASSERT_TRUE(i == 1 || sizes[i] <= sizes[i - 1]);
    }
    const double held = static_cast<double>(share - sizes.front());
    const double bound = held > 0 ? 2 + std::log2(held / static_cast<double>(unit)) : 1;
    ASSERT_LE(static_cast<double>(std::set<std::int64_t>(sizes.begin(), sizes.end()).size()), bound);
  }
}

TEST(Chunks, RefuseWhatIsNoCut) {
  EXPECT_THROW((void)chunks(-1), InvalidArgument);
  EXPECT_THROW((void)chunks(10, {.fixed_size = -1}), InvalidArgument);
  EXPECT_THROW((void)chunks(10, {.fixed_size = 6, .granularity = 4}), InvalidArgument);
  EXPECT_THROW((void)chunks(10, {.correction_fraction = 1.0}), InvalidArgument);
  EXPECT_THROW((void)chunks(10, {.correction_fraction = std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
  EXPECT_THROW((void)chunks(10, {.floor = 0}), InvalidArgument);
  EXPECT_THROW((void)chunks(10, {.granularity = 0}), InvalidArgument);
}

TEST(CorrectionFloor, IsTheFirstSizeWhoseFixedCostIsWorthIt) {
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 0.5), 8);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 0.2), 32);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 0.5, 6), 12);
  EXPECT_EQ(correction_floor(CostModel::affine(0.0, 0.5)), 1);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 1.0), 1);
  const std::array points{CostPoint{0, 2.0}, CostPoint{10, 2.0}, CostPoint{20, 6.0}};
  EXPECT_EQ(correction_floor(CostModel::table(points), 0.5), 15);
}

TEST(CorrectionFloor, IsOutOfReachWhereTimeDoesNotGrow) {
  EXPECT_GT(correction_floor(CostModel::affine(4.0, 0.0)), std::int64_t{1} << 61);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.0), 0.5, 1000) % 1000, 0);
  EXPECT_EQ(chunks(100, {.correction_fraction = 0.5, .floor = correction_floor(CostModel::affine(4.0, 0.0))}),
            (Sizes{100}));
}

TEST(CorrectionFloor, RefusesAnOverheadThatIsNoPart) {
  EXPECT_THROW((void)correction_floor(CostModel(), 0.0), InvalidArgument);
  EXPECT_THROW((void)correction_floor(CostModel(), 1.5), InvalidArgument);
  EXPECT_THROW((void)correction_floor(CostModel(), 0.5, 0), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan

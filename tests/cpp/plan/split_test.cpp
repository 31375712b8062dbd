// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::plan {
namespace {

using Shares = std::vector<std::int64_t>;

std::string split_refusal(std::int64_t batch_size, const std::vector<CostModel>& models, const SplitOptions& options) {
  try {
    (void)split_batch(batch_size, models, options);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

#define EXPECT_NAMES(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST(BatchSplit, GivesEqualDevicesEqualShares) {
  const std::vector<CostModel> models(8, CostModel::affine(0.004, 0.0001));
  EXPECT_EQ(split_batch(512, models).shares, Shares(8, 64));
  EXPECT_EQ(split_batch(515, models).shares, (Shares{65, 65, 65, 64, 64, 64, 64, 64}));
  EXPECT_EQ(split_batch(3, models).shares, (Shares{1, 1, 1, 0, 0, 0, 0, 0}));
}

TEST(BatchSplit, SplitsByFinishTimeAndNotBySpeed) {
  const std::vector models{CostModel::affine(6.0, 1.0), CostModel::affine(0.0, 1.0)};
  const Split split = split_batch(10, models);
  EXPECT_EQ(split.shares, (Shares{2, 8}));
  EXPECT_EQ(split.makespan_seconds, 8.0);
}

TEST(BatchSplit, LeavesADeviceIdleWhoseFirstItemWouldFinishLast) {
  const std::vector models{CostModel::affine(0.0, 1.0), CostModel::affine(50.0, 1.0)};
  EXPECT_EQ(split_batch(10, models).shares, (Shares{10, 0}));
  SplitOptions options;
  options.limits = {{}, {.may_be_zero = false}};
  const Split forced = split_batch(10, models, options);
  EXPECT_EQ(forced.shares, (Shares{9, 1}));
  EXPECT_EQ(forced.makespan_seconds, 51.0);
}

TEST(BatchSplit, PaysStartupOnlyOnDevicesWithWork) {
  const std::vector models(2, CostModel::affine(0.0, 1.0));
  SplitOptions options;
  options.limits = {{}, {.startup_seconds = 5.0}};
  EXPECT_EQ(split_batch(4, models, options).makespan_seconds, 4.0);
  EXPECT_EQ(split_batch(9, models, options).shares, (Shares{7, 2}));
}

TEST(BatchSplit, UsesFewerDevicesWhereTheirReductionCostsMore) {
  const std::vector models(3, CostModel::affine(0.0, 1.0));
  SplitOptions options;
  options.reduction_seconds = {0.0, 0.0, 1.0, 9.0};
  const Split split = split_batch(12, models, options);
  EXPECT_EQ(split.shares, (Shares{6, 6, 0}));
  EXPECT_EQ(split.makespan_seconds, 7.0);
}

TEST(BatchSplit, KeepsSharesOutOfTheGapBelowTheMinimum) {
  const std::vector models(3, CostModel::affine(0.0, 1.0));
  SplitOptions options;
  options.limits.assign(3, {.minimum = 5});
  EXPECT_EQ(split_batch(12, models, options).shares, (Shares{6, 6, 0}));
  EXPECT_EQ(split_batch(15, models, options).shares, (Shares{5, 5, 5}));
}

TEST(BatchSplit, PutsTheRemainderOfTheGranularityWhereItCostsLeast) {
  const std::vector models{CostModel::affine(0.0, 1.0), CostModel::affine(0.0, 0.9)};
  SplitOptions options;
  options.granularity = 8;
  EXPECT_EQ(split_batch(16, models, options).shares, (Shares{8, 8}));
  EXPECT_EQ(split_batch(18, models, options).shares, (Shares{8, 10}));
  EXPECT_EQ(split_batch(5, models, options).shares, (Shares{0, 5}));
}

TEST(BatchSplit, SeesADifferenceOfOneBit) {
  const std::vector models{CostModel::affine(1.0, 0.0), CostModel::affine(std::nextafter(1.0, 0.0), 0.0)};
  SplitOptions options;
  options.granularity = 4;
  const Split split = split_batch(3, models, options);
  EXPECT_EQ(split.shares, (Shares{0, 3}));
  EXPECT_EQ(split.makespan_seconds, std::nextafter(1.0, 0.0));
}

TEST(BatchSplit, RespectsTheMaximumOfADeviceWithoutMemory) {
  const std::vector models{CostModel::affine(0.0, 0.1), CostModel::affine(0.0, 1.0)};
  SplitOptions options;
  options.limits = {{.maximum = 10}, {}};
  EXPECT_EQ(split_batch(64, models, options).shares, (Shares{10, 54}));
}

TEST(BatchSplit, KeepsThePreviousSharesWhenTheyAreAsGood) {
  const std::vector models(4, CostModel::affine(0.0, 1.0));
  SplitOptions options;
  options.previous = {2, 3, 2, 3};
  EXPECT_EQ(split_batch(10, models, options).shares, options.previous);
  options.previous = {1, 3, 3, 4};  // the last share is too large; reducing it changes at most two devices
  EXPECT_EQ(split_batch(10, models, options).shares, (Shares{1, 3, 3, 3}));
}

TEST(BatchSplit, ChangesLowerNumberedDevicesFirst) {
  const std::vector models(3, CostModel::affine(0.0, 1.0));
  SplitOptions options;
  options.previous = {2, 2, 2};
  EXPECT_EQ(split_batch(7, models, options).shares, (Shares{3, 2, 2}));
}

TEST(BatchSplit, HandlesFlatCostsOfMillionsOfItems) {
  SplitOptions options;
  options.limits.assign(3, {.maximum = 40'000'000});
  const std::vector models(3, CostModel::affine(1.0, 0.0));
  const Split split = split_batch(100'000'000, models, options);
  EXPECT_EQ(split.shares, (Shares{40'000'000, 40'000'000, 20'000'000}));
  EXPECT_EQ(split.makespan_seconds, 1.0);
}

TEST(BatchSplit, HandlesCostsTooSmallToAddUp) {
  const std::vector models{CostModel::affine(1.0, 1e-25), CostModel(), CostModel::affine(0.0, 1e-300)};
  const Split split = split_batch(1'000'000'000'000, models);
  EXPECT_EQ(split.shares, (Shares{0, 1'000'000'000'000, 0}));
  EXPECT_EQ(split.makespan_seconds, 0.0);
}

TEST(BatchSplit, OfNothingIsNothing) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  SplitOptions options;
  options.reduction_seconds = {7.0, 7.0, 7.0};
  const Split split = split_batch(0, models, options);
  EXPECT_EQ(split.shares, (Shares{0, 0}));
  EXPECT_EQ(split.makespan_seconds, 0.0);
}

TEST(BatchSplit, NamesTheConstraintThatCannotBeMet) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  SplitOptions options;
  options.limits = {{.maximum = 3}, {.maximum = 4}};
  EXPECT_NAMES(split_refusal(8, models, options), "maximums of the 2 devices add up to 7");
  options.limits = {{.minimum = 5, .may_be_zero = false}, {.minimum = 4, .may_be_zero = false}};
  EXPECT_NAMES(split_refusal(8, models, options), "must take part (may_be_zero is false) add up to 9");
  EXPECT_NAMES(split_refusal(0, models, options), "add up to 9");
  options.limits = {{.minimum = 5, .maximum = 6}, {.minimum = 5, .maximum = 6}};
  EXPECT_NAMES(split_refusal(8, models, options), "2 devices have a minimum above one item");
  options.limits = {{.maximum = 0, .may_be_zero = false}, {}};
  EXPECT_NAMES(split_refusal(8, models, options), "device 0 must take part");
  options.limits = {{.maximum = 7}, {.maximum = 7}};
  options.granularity = 4;
  EXPECT_NAMES(split_refusal(12, models, options), "granularity 4: below their maximums the 2 devices can take 8");
}

TEST(BatchSplit, RefusesNumbersThatMakeNoSense) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NAMES(split_refusal(8, {}, {}), "no devices");
  EXPECT_NAMES(split_refusal(-1, models, {}), "batch_size is -1");
  EXPECT_NAMES(split_refusal(8, models, {.granularity = 0}), "granularity is 0");
  EXPECT_NAMES(split_refusal(8, models, {.limits = {{}}}), "limits has 1 entry where 2 are needed");
  EXPECT_NAMES(split_refusal(8, models, {.limits = {{.minimum = 4, .maximum = 3}, {}}}),
               "device 0 has minimum 4 and maximum 3");
  EXPECT_NAMES(split_refusal(8, models, {.limits = {{}, {.startup_seconds = nan}}}), "startup_seconds at 1 is nan");
  EXPECT_NAMES(split_refusal(8, models, {.reduction_seconds = {0.0, 1.0}}),
               "reduction_seconds has 2 entries where 3 are needed");
  EXPECT_NAMES(split_refusal(8, models, {.reduction_seconds = {0.0, 1.0, -1.0}}), "reduction_seconds at 2 is -1");
  EXPECT_NAMES(split_refusal(8, models, {.previous = {1}}), "previous has 1 entry");
  EXPECT_NAMES(split_refusal(8, models, {.previous = {1, -1}}), "previous share 1 is -1");
  EXPECT_NAMES(split_refusal(8, {CostModel::affine(0.0, 1e308)}, {}), "overflows at 8 items");
}

}  // namespace
}  // namespace paceline::plan

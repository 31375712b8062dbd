// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

#include "errors.hpp"

namespace paceline::plan {
namespace {

using Shares = std::vector<std::int64_t>;

std::string refusal(std::int64_t batch_size, const std::vector<CostModel>& models, const SplitOptions& options) {
  return message_of([&] { (void)split_batch(batch_size, models, options); });
}

struct ByHand {
  const char* what;
  std::vector<CostModel> models;
  std::int64_t items;
  SplitOptions options;
  Shares shares;
  double makespan = -1.0;  // not compared
};

TEST(BatchSplit, IsWhatOneWouldPlanByHand) {
  const CostModel even = CostModel::affine(0.0, 1.0);
  const std::vector<CostModel> two(2, even);
  const std::vector<CostModel> three(3, even);
  const std::vector<CostModel> late{even, CostModel::affine(50.0, 1.0)};
  const std::vector<CostModel> a_bit_apart{CostModel::affine(1.0, 0.0),
                                           CostModel::affine(std::nextafter(1.0, 0.0), 0.0)};
  const ShareLimits some{.maximum = 40'000'000};
  const std::vector<ByHand> all{
      {"what is left goes first",
       std::vector(8, CostModel::affine(0.004, 0.0001)),
       515,
       {},
       {65, 65, 65, 64, 64, 64, 64, 64}},
      {"finish times count, not speeds", {CostModel::affine(6.0, 1.0), even}, 10, {}, {2, 8}, 8.0},
      {"the first item would finish last", late, 10, {}, {10, 0}},
      {"a device that must take part", late, 10, {.limits = {{}, {.may_be_zero = false}}}, {9, 1}, 51.0},
      {"who has no work pays no start", two, 4, {.limits = {{}, {.startup_seconds = 5.0}}}, {4, 0}, 4.0},
      {"who has work pays its start", two, 9, {.limits = {{}, {.startup_seconds = 5.0}}}, {7, 2}},
      {"a reduction that costs more", three, 12, {.reduction_seconds = {0.0, 0.0, 1.0, 9.0}}, {6, 6, 0}, 7.0},
      {"the gap below the minimum", three, 12, {.limits = std::vector<ShareLimits>(3, {.minimum = 5})}, {6, 6, 0}},
      {"the remainder where it costs least", {even, CostModel::affine(0.0, 0.9)}, 18, {.granularity = 8}, {8, 10}},
      {"a difference of one bit", a_bit_apart, 3, {.granularity = 4}, {0, 3}, std::nextafter(1.0, 0.0)},
      {"little memory", {CostModel::affine(0.0, 0.1), even}, 64, {.limits = {{.maximum = 10}, {}}}, {10, 54}},
      {"shares before that are as good", std::vector(4, even), 10, {.previous = {2, 3, 2, 3}}, {2, 3, 2, 3}},
      {"few changes", std::vector(4, even), 10, {.previous = {1, 3, 3, 4}}, {1, 3, 3, 3}},
      {"lower numbers change first", three, 7, {.previous = {2, 2, 2}}, {3, 2, 2}},
      {"flat costs of millions",
       std::vector(3, CostModel::affine(1.0, 0.0)),
       100'000'000,
       {.limits = {some, some, some}},
       {40'000'000, 40'000'000, 20'000'000},
       1.0},
      {"costs too small to add up",
       {CostModel::affine(1.0, 1e-25), CostModel(), CostModel::affine(0.0, 1e-300)},
       1'000'000'000'000,
       {},
       {0, 1'000'000'000'000, 0},
       0.0},
      {"nothing", two, 0, {.reduction_seconds = {7.0, 7.0, 7.0}}, {0, 0}, 0.0}};
  for (const ByHand& one : all) {
    const Split split = split_batch(one.items, one.models, one.options);
    EXPECT_EQ(split.shares, one.shares) << one.what;
    if (one.makespan >= 0.0) {
      EXPECT_EQ(split.makespan_seconds, one.makespan) << one.what;
    }
  }
}

TEST(BatchSplit, NamesTheConstraintThatCannotBeMet) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  SplitOptions options;
  options.limits = {{.maximum = 3}, {.maximum = 4}};
  EXPECT_TRUE(says(refusal(8, models, options), "maximums of the 2 devices add up to 7"));
  options.limits = {{.minimum = 5, .may_be_zero = false}, {.minimum = 4, .may_be_zero = false}};
  EXPECT_TRUE(says(refusal(8, models, options), "must take part (may_be_zero is false) add up to 9"));
  EXPECT_TRUE(says(refusal(0, models, options), "add up to 9"));
  options.limits = {{.minimum = 5, .maximum = 6}, {.minimum = 5, .maximum = 6}};
  EXPECT_TRUE(says(refusal(8, models, options), "2 devices have a minimum above one item"));
  options.limits = {{.maximum = 0, .may_be_zero = false}, {}};
  EXPECT_TRUE(says(refusal(8, models, options), "device 0 must take part"));
  options.limits = {{.maximum = 7}, {.maximum = 7}};
  options.granularity = 4;
  EXPECT_TRUE(says(refusal(12, models, options), "granularity 4: below their maximums the 2 devices can take 8"));
}

TEST(BatchSplit, RefusesNumbersThatMakeNoSense) {
  const std::vector models(2, CostModel::affine(1.0, 1.0));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(says(refusal(8, {}, {}), "no devices"));
  EXPECT_TRUE(says(refusal(-1, models, {}), "batch_size is -1"));
  EXPECT_TRUE(says(refusal(8, models, {.granularity = 0}), "granularity is 0"));
  EXPECT_TRUE(says(refusal(8, models, {.limits = {{}}}), "limits has 1 entry where 2 are needed"));
  EXPECT_TRUE(
      says(refusal(8, models, {.limits = {{.minimum = 4, .maximum = 3}, {}}}), "device 0 has minimum 4 and maximum 3"));
  EXPECT_TRUE(says(refusal(8, models, {.limits = {{}, {.startup_seconds = nan}}}), "startup_seconds at 1 is nan"));
  EXPECT_TRUE(says(refusal(8, models, {.reduction_seconds = {0.0, 1.0}}),
                   "reduction_seconds has 2 entries where 3 are needed"));
  EXPECT_TRUE(says(refusal(8, models, {.reduction_seconds = {0.0, 1.0, -1.0}}), "reduction_seconds at 2 is -1"));
  EXPECT_TRUE(says(refusal(8, models, {.previous = {1}}), "previous has 1 entry"));
  EXPECT_TRUE(says(refusal(8, models, {.previous = {1, -1}}), "previous share 1 is -1"));
  EXPECT_TRUE(says(refusal(8, {CostModel::affine(0.0, 1e308)}, {}), "overflows at 8 items"));
}

}  // namespace
}  // namespace paceline::plan

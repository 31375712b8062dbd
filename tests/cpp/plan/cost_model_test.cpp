// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include <paceline/error.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/item_cost.hpp>

namespace paceline::plan {
namespace {

TEST(CostModel, CostsNothingByDefault) {
  EXPECT_EQ(CostModel().seconds(1'000'000), 0.0);
  EXPECT_EQ(CostModel().items_within(0.0, 7), 7);
}

TEST(CostModel, AddsTheFixedCostToThePriceOfEachItem) {
  const CostModel model = CostModel::affine(0.5, 0.25);
  EXPECT_EQ(model.seconds(0), 0.5);
  EXPECT_EQ(model.seconds(6), 2.0);
  EXPECT_EQ(model.items_within(2.0, 100), 6);
  EXPECT_EQ(model.items_within(std::nextafter(2.0, 0.0), 100), 5);
  EXPECT_EQ(model.items_within(0.49, 100), -1);
  EXPECT_EQ(model.items_within(2.0, 3), 3);
}

TEST(CostModel, KeepsItsShapeWhenScaled) {
  EXPECT_EQ(CostModel::affine(1.0, 0.5).scaled(3.0), CostModel::affine(3.0, 1.5));
}

TEST(CostModel, RefusesNegativeAndInfiniteCosts) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THROW((void)CostModel::affine(-1.0, 0.0), InvalidArgument);
  EXPECT_THROW((void)CostModel::affine(0.0, nan), InvalidArgument);
  EXPECT_THROW((void)CostModel::affine(infinity, 0.0), InvalidArgument);
  EXPECT_THROW((void)CostModel::affine(1.0, 1.0).scaled(-2.0), InvalidArgument);
}

// Coefficients whose decimal fractions round at every step, and slopes far smaller than the fixed cost.
TEST(CostModel, IsNondecreasingAndInvertedExactlyInItsOwnDoubles) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(-18.0, 2.0);
  for (int round = 0; round < 2000; ++round) {
    const CostModel model = CostModel::affine(std::pow(10.0, exponent(random)), std::pow(10.0, exponent(random)));
    constexpr std::int64_t limit = 150;
    for (std::int64_t n = 0; n < limit; ++n)
      ASSERT_LE(model.seconds(n), model.seconds(n + 1)) << "round " << round << ", n " << n;
    for (int probe = 0; probe < 10; ++probe) {
      const double budget = model.seconds(static_cast<std::int64_t>(random() % limit)) * (probe % 2 == 0 ? 1.0 : 0.999);
      std::int64_t expected = -1;
      while (expected < limit && model.seconds(expected + 1) <= budget) ++expected;
      ASSERT_EQ(model.items_within(budget, limit), expected) << "round " << round << ", budget " << budget;
    }
  }
}

TEST(CostModel, FindsTheEndOfAFlatPartOfBillionsOfItems) {
  const CostModel model = CostModel::affine(1.0, 1e-26);
  const std::int64_t items = model.items_within(1.0, std::int64_t{1} << 60);
  EXPECT_EQ(model.seconds(items), 1.0);
  EXPECT_GT(model.seconds(items + 1), 1.0);
}

constexpr ItemCost kTruth{4e-3, 2e-6, 3e-9};

// Micro-batches of one item, of lengths 64 to 4096, in turn on devices that are `scales` times slower. `noise` is the
// relative standard deviation.
std::vector<ItemSample> measure(const ItemCost& truth, const std::vector<double>& scales, double noise,
                                std::size_t count = 120) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> deviation;
  std::vector<ItemSample> samples;
  for (std::size_t i = 0; i < count; ++i) {
    const double tokens = 64.0 * static_cast<double>(1 + i * 7 % 64);
    const std::size_t device = i % scales.size();
    samples.push_back({.tokens = tokens,
                       .seconds = scales[device] * truth.seconds(tokens) * (1.0 + noise * deviation(random)),
                       .device = static_cast<std::int64_t>(device)});
  }
  return samples;
}

double relative_rms(const ItemCostFit& fit, const std::vector<ItemSample>& samples) {
  double sum = 0.0;
  for (const ItemSample& sample : samples) {
    const double scale = fit.scales[static_cast<std::size_t>(sample.device)];
    sum += std::pow(scale * fit.shape.seconds(sample.tokens) / sample.seconds - 1.0, 2);
  }
  return std::sqrt(sum / static_cast<double>(samples.size()));
}

TEST(ItemCostFit, RecoversAQuadraticWithoutNoise) {
  const ItemCostFit fit = fit_item_cost(measure(kTruth, {1.0}, 0.0));
  EXPECT_NEAR(fit.shape.fixed_seconds / kTruth.fixed_seconds, 1.0, 1e-9);
  EXPECT_NEAR(fit.shape.per_token_seconds / kTruth.per_token_seconds, 1.0, 1e-9);
  EXPECT_NEAR(fit.shape.per_squared_token_seconds / kTruth.per_squared_token_seconds, 1.0, 1e-9);
  EXPECT_LT(fit.relative_rms, 1e-11);
  EXPECT_EQ(fit.scales, (std::vector<double>{1.0}));
}

TEST(ItemCostFit, SharesTheShapeAndScalesEachDevice) {
  const ItemCostFit fit = fit_item_cost(measure(kTruth, {1.5, 1.0, 3.0}, 0.0));
  ASSERT_EQ(fit.scales.size(), 3U);
  EXPECT_NEAR(fit.scales[0], 1.5, 1e-6);
  EXPECT_EQ(fit.scales[1], 1.0) << "the fastest";
  EXPECT_NEAR(fit.scales[2], 3.0, 1e-6);
  EXPECT_NEAR(fit.shape.seconds(2000) / kTruth.seconds(2000), 1.0, 1e-6);
  EXPECT_LT(fit.relative_rms, 1e-6);
}

TEST(ItemCostFit, TellsItsError) {
  const std::vector<ItemSample> samples = measure(kTruth, {1.0, 2.0}, 0.05, 400);
  const ItemCostFit fit = fit_item_cost(samples);
  EXPECT_NEAR(fit.relative_rms, relative_rms(fit, samples), 1e-12);
  EXPECT_NEAR(fit.relative_rms, 0.05, 0.01);
  EXPECT_NEAR(fit.scales[1], 2.0, 0.05);
}

TEST(ItemCostFit, KeepsCoefficientsFromGoingNegative) {
  // Saturating: an unconstrained fit would bend down with a negative square.
  std::vector<ItemSample> samples;
  for (double tokens = 100; tokens <= 1000; tokens += 100)
    samples.push_back({.tokens = tokens, .seconds = std::sqrt(tokens)});
  const ItemCostFit fit = fit_item_cost(samples);
  EXPECT_EQ(fit.shape.per_squared_token_seconds, 0.0);
  EXPECT_GT(fit.shape.fixed_seconds, 0.0);
  EXPECT_GT(fit.shape.per_token_seconds, 0.0);
  EXPECT_GT(fit.relative_rms, 0.01);
}

TEST(ItemCostFit, IsNoWorseThanAnyCostNearby) {
  const std::vector<ItemSample> samples = measure(kTruth, {1.0}, 0.2, 60);
  const ItemCostFit fit = fit_item_cost(samples);
  for (const double a : {-1e-3, 0.0, 1e-3}) {
    for (const double b : {-1e-7, 0.0, 1e-7}) {
      for (const double c : {-1e-10, 0.0, 1e-10}) {
        ItemCostFit other = fit;
        other.shape.fixed_seconds = std::max(0.0, other.shape.fixed_seconds + a);
        other.shape.per_token_seconds = std::max(0.0, other.shape.per_token_seconds + b);
        other.shape.per_squared_token_seconds = std::max(0.0, other.shape.per_squared_token_seconds + c);
        EXPECT_GE(relative_rms(other, samples), fit.relative_rms - 1e-12) << a << ' ' << b << ' ' << c;
      }
    }
  }
}

TEST(ItemCostFit, CountsSquaresItemByItemInAMicroBatch) {
  std::vector<ItemSample> samples;
  for (const double items : {1.0, 2.0, 4.0, 8.0}) {
    for (const double length : {128.0, 512.0, 2048.0}) {
      samples.push_back({.tokens = items * length,
                         .seconds = kTruth.fixed_seconds + items * kTruth.item_seconds(length),
                         .squared_tokens = items * length * length});
    }
  }
  const ItemCostFit fit = fit_item_cost(samples);
  EXPECT_NEAR(fit.shape.item_seconds(700) / kTruth.item_seconds(700), 1.0, 1e-9);
  for (ItemSample& sample : samples) sample.squared_tokens = 0.0;
  EXPECT_GT(fit_item_cost(samples).relative_rms, 0.05) << "one long item is not what many short ones cost";
}

TEST(ItemCostFit, OfOneLengthIsWhatThatLengthTook) {
  const ItemCostFit fit =
      fit_item_cost(std::vector<ItemSample>{{.tokens = 512, .seconds = 0.1}, {.tokens = 512, .seconds = 0.1}});
  EXPECT_NEAR(fit.shape.seconds(512), 0.1, 1e-15);
  EXPECT_EQ(fit.shape.item_seconds(512), 0.0) << "nothing says that tokens cost anything";
}

TEST(ItemCostFit, DoesNotDependOnUnits) {
  std::vector<ItemSample> samples = measure(kTruth, {1.0, 1.3}, 0.03);
  const ItemCostFit fit = fit_item_cost(samples);
  for (ItemSample& sample : samples) {
    sample.tokens *= 1024.0;
    sample.seconds *= 1024.0;
  }
  const ItemCostFit other = fit_item_cost(samples);
  EXPECT_NEAR(other.shape.per_token_seconds / fit.shape.per_token_seconds, 1.0, 1e-9);
  EXPECT_NEAR(other.scales[1], fit.scales[1], 1e-9);
}

TEST(ItemCostFit, GivesTheDevicesToSplitItems) {
  const ItemCostFit fit = fit_item_cost(measure(kTruth, {1.0, 2.0}, 0.0));
  EXPECT_NEAR(fit.load_model(1).fixed_seconds, 2.0 * kTruth.fixed_seconds, 1e-8);
  EXPECT_NEAR(fit.load_model(1).seconds_per_cost, 2.0, 1e-6);
  EXPECT_EQ(fit.load_model(9).seconds_per_cost, 1.0) << "not measured: as the fastest";
}

TEST(ItemCostFit, LeavesADeviceWithoutSamplesOut) {
  std::vector<ItemSample> samples = measure(kTruth, {1.0}, 0.0);
  for (ItemSample& sample : samples) sample.device = 2;
  EXPECT_EQ(fit_item_cost(samples).scales, (std::vector<double>{0.0, 0.0, 1.0}));
}

TEST(ItemCostFit, RefusesWhatWasNotMeasured) {
  EXPECT_THROW(fit_item_cost({}), InvalidArgument);
  EXPECT_THROW(fit_item_cost(std::vector<ItemSample>{{.tokens = 1, .seconds = 0}}), InvalidArgument);
  EXPECT_THROW(fit_item_cost(std::vector<ItemSample>{{.tokens = -1, .seconds = 1}}), InvalidArgument);
  EXPECT_THROW(fit_item_cost(std::vector<ItemSample>{{.tokens = 1, .seconds = 1, .device = -1}}), InvalidArgument);
  EXPECT_THROW(
      fit_item_cost(std::vector<ItemSample>{{.tokens = std::numeric_limits<double>::quiet_NaN(), .seconds = 1}}),
      InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan

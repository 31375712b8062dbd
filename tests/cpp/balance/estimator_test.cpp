// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/random.hpp>
#include <paceline/sim/box.hpp>

#include "balance/estimator.hpp"
#include "balance/reduction_cost.hpp"
#include "balance/shape.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

std::vector<DeviceProfile> profiles(std::size_t count) {
  std::vector<DeviceProfile> out;
  for (std::size_t i = 0; i < count; ++i) out.push_back({"sim:" + std::to_string(i), "sim", {}});
  return out;
}

/// Steps of equal devices (4 ms + 0.1 ms an item) with noise. `slow(step, device)` multiplies each time.
struct Feed {
  Estimator estimator;
  double noise;
  std::uint64_t seed = 1;
  std::int64_t step = 0;

  void run(int steps, const std::vector<std::int64_t>& items,
           const std::function<double(std::int64_t, std::size_t)>& slow) {
    for (int k = 0; k < steps; ++k, ++step) {
      StepTimings timings;
      for (std::size_t i = 0; i < items.size(); ++i) {
        plan::Random random(seed, static_cast<std::uint64_t>(step), i);
        const double seconds = (0.004 + 0.0001 * static_cast<double>(items[i])) * slow(step, i);
        timings.devices.push_back({{items[i], seconds * std::exp(noise * random.normal())}});
      }
      estimator.record(step, timings);
    }
  }
  void run(int steps, const std::vector<std::int64_t>& items) {
    run(steps, items, [](std::int64_t, std::size_t) { return 1.0; });
  }
};

/// Makes one device slower by `factor` in steps [from, to).
std::function<double(std::int64_t, std::size_t)> slower(double factor, std::int64_t from, std::int64_t to) {
  return [=](std::int64_t step, std::size_t i) { return i == 0 && step >= from && step < to ? factor : 1.0; };
}

/// A feed of 50 steps with an excursion of ten steps.
Feed after_an_excursion() {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(50, {64, 64}, slower(1.2, 20, 30));
  return feed;
}

TEST(Estimator, WaitsUntilAChangeHasOutlastedExcursionsOfItsSize) {
  Feed feed = after_an_excursion();
  const DeviceEstimate& device = feed.estimator.devices()[0];
  EXPECT_EQ(device.change_points, 2);  // two changes, there and back, because excursions were unknown before
  const double before = device.own_scale;
  feed.run(8, {64, 64}, slower(1.2, 0, 100));
  EXPECT_TRUE(feed.estimator.doubtful(0));
  feed.run(2, {64, 64});
  EXPECT_EQ(device.change_points, 2);
  EXPECT_NEAR(device.own_scale / before, 1.0, 0.01);
  feed.run(10, {64, 64}, slower(1.2, 0, 100));
  EXPECT_EQ(device.change_points, 2);
  feed.run(1, {64, 64}, slower(1.2, 0, 100));
  EXPECT_EQ(device.change_points, 3);
  EXPECT_EQ(device.since_step, 60);
  EXPECT_EQ(device.samples, 11u);
  EXPECT_NEAR(device.own_scale / before, 1.2, 0.02);
}

TEST(Estimator, TimeBetweenExcursionsIsNone) {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(40, {64, 64});
  const DeviceEstimate& device = feed.estimator.devices()[0];
  for (int k = 0; k < 3; ++k) {  // a short excursion, then two longer ones that each count as a change and end again
    feed.run(8 + 4 * k, {64, 64}, slower(1.2, 0, 10000));
    feed.run(50, {64, 64});
  }
  EXPECT_EQ(device.change_points, 6);
  const std::int64_t before = feed.step;
  feed.run(17, {64, 64}, slower(1.2, 0, 10000));  // longer than the longest excursion of 16 steps
  EXPECT_EQ(device.change_points, 7);
  EXPECT_EQ(device.since_step, before);
}

TEST(Estimator, TheWayBackIsBelievedAtOnce) {
  Feed feed = after_an_excursion();
  feed.run(30, {64, 64}, slower(1.2, 0, 10000));
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 3);
  feed.run(2, {64, 64});
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 4);
}

TEST(Estimator, ALongRunThatIsBelievedIsNoNoise) {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(120, {64, 64}, slower(1.2, 20, 60));  // an excursion of 40 steps
  feed.run(400, {64, 64});
  const double error = feed.estimator.devices()[0].error;
  feed.run(41 + 128, {64, 64}, slower(1.2, 0, 10000));
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 3);
  EXPECT_EQ(feed.estimator.devices()[0].samples, 128u);
  EXPECT_LT(feed.estimator.devices()[0].error, 2.0 * error);
}

TEST(Estimator, ADeviceThatWasNotSeenForLongIsBelievedAtOnce) {
  Feed feed = after_an_excursion();
  feed.run(100, {0, 64});
  feed.run(2, {64, 64}, slower(1.2, 0, 10000));
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 3);
}

TEST(Estimator, BelievesALargerChangeThanAnyExcursionAtOnce) {
  for (const double factor : {1.35, 2.0, 0.5}) {
    Feed feed = after_an_excursion();
    feed.run(2, {64, 64}, slower(factor, 0, 100));
    EXPECT_EQ(feed.estimator.devices()[0].change_points, 3) << factor;
  }
}

TEST(Estimator, AStragglerThatComesAndGoesIsBelievedEachTime) {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(20, {64, 64});
  for (int k = 1; k <= 8; ++k) {
    feed.run(12, {64, 64}, slower(1.6, 0, 1000));
    feed.run(12, {64, 64});
    EXPECT_EQ(feed.estimator.devices()[0].change_points, 2 * k);
  }
}

TEST(Estimator, BelievesALargeChangeAtOnceUntilOneWasASpike) {
  for (const int gap : {0, 1}) {  // steps without work for the device after each of its own
    Feed feed{Estimator(profiles(2)), 0.01};
    const auto run = [&](int steps, double factor) {
      for (int k = 0; k < steps; ++k) {
        feed.run(1, {64, 64}, [&](std::int64_t, std::size_t device) { return device == 0 ? factor : 1.0; });
        feed.run(gap, {0, 64});
      }
      return feed.estimator.devices()[0].change_points;
    };
    run(10, 1.0);
    const double before = feed.estimator.devices()[0].own_scale;
    EXPECT_EQ(run(1, 3.0), 1);
    EXPECT_NEAR(feed.estimator.devices()[0].own_scale / before, 3.0, 0.1);
    run(5, 3.0);
    EXPECT_EQ(run(1, 1.0), 2);
    EXPECT_NEAR(feed.estimator.devices()[0].own_scale / before, 1.0, 0.05);
    run(5, 1.0);
    EXPECT_EQ(run(1, 2.0), 3);
    EXPECT_EQ(run(1, 1.0), 4);  // it was a spike
    EXPECT_EQ(run(1, 1.0), 4);
    EXPECT_EQ(run(1, 2.0), 4) << gap;
    EXPECT_EQ(run(1, 2.0), 5) << gap;
  }
}

TEST(Estimator, RemembersASpikeThatWasTooLargeToBeBelievedAlsoAfterAGap) {
  for (const int gap : {0, 1}) {
    Feed feed{Estimator(profiles(2)), 0.01};
    const auto at = [&](double factor) {
      feed.run(1, {64, 64}, [&](std::int64_t, std::size_t device) { return device == 0 ? factor : 1.0; });
      feed.run(gap, {0, 64});
      return feed.estimator.devices()[0].change_points;
    };
    for (int k = 0; k < 10; ++k) at(1.0);
    EXPECT_EQ(at(5.0), 0);
    EXPECT_EQ(at(1.0), 0);
    EXPECT_EQ(at(2.0), 0) << gap;
    EXPECT_EQ(at(2.0), 1) << gap;
  }
}

TEST(Estimator, BelievesNoSingleSampleThatWouldCostADeviceItsWorkOrIsNotClear) {
  for (const auto& [noise, factor] : {std::pair(0.01, 4.0), std::pair(0.01, 1.35), std::pair(0.1, 1.7)}) {
    Feed feed{Estimator(profiles(1)), noise};
    feed.run(40, {64});
    feed.run(1, {64}, [&, by = factor](std::int64_t, std::size_t) { return by; });
    EXPECT_EQ(feed.estimator.devices()[0].change_points, 0) << factor;
  }
}

TEST(Estimator, TakesOutliersOnBothSidesAsNoise) {
  Feed feed{Estimator(profiles(1)), 0.01};
  feed.run(10, {64});
  feed.run(6, {64}, [](std::int64_t step, std::size_t) { return step % 2 == 0 ? 1.35 : 0.75; });
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 0);
}

TEST(Estimator, LeavesAStepInWhichTheChangeFellOutOfTheNewLevel) {
  Feed feed{Estimator(profiles(1)), 0.005};
  feed.run(10, {64});
  const double before = feed.estimator.devices()[0].own_scale;
  feed.run(2, {64}, [](std::int64_t step, std::size_t) { return step == 10 ? 1.4 : 2.0; });
  EXPECT_EQ(feed.estimator.devices()[0].samples, 1u);
  EXPECT_NEAR(feed.estimator.devices()[0].own_scale / before, 2.0, 0.05);
}

TEST(Estimator, ForgetsWhatWasBeforeADrift) {
  Feed feed{Estimator(profiles(1)), 0.01};
  feed.run(128, {64});
  const double before = feed.estimator.devices()[0].own_scale;
  feed.run(40, {64}, [](std::int64_t, std::size_t) { return 1.05; });
  // The median of 88 samples before and 40 after would not have moved.
  EXPECT_NEAR(feed.estimator.devices()[0].own_scale / before, 1.05, 0.01);
  EXPECT_EQ(feed.estimator.devices()[0].drifts, 1);
  EXPECT_GE(feed.estimator.devices()[0].since_step, 110);
}

TEST(Estimator, ComparesDevicesUnderTheSameConditions) {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(100, {64, 64});
  // One device changes. From then on a third program slows down both, so the other one's long window covers the time
  // before.
  feed.run(20, {64, 64}, [](std::int64_t step, std::size_t i) { return i == 0 ? 2.0 : (step < 102 ? 1.0 : 1.06); });
  const auto ratio = [&] { return feed.estimator.devices()[0].own_scale / feed.estimator.devices()[1].own_scale; };
  EXPECT_NEAR(ratio(), 2.0 / 1.06, 0.1);
  feed.run(20, {64, 64}, [](std::int64_t, std::size_t i) { return i == 0 ? 2.0 * 1.06 : 1.06; });
  EXPECT_NEAR(ratio(), 2.0, 0.04);
}

constexpr double kFixed = 4.0;
constexpr double kPerItem = 0.1;

double seconds(std::int64_t items, double noise, plan::Random& random) {
  return (kFixed + kPerItem * static_cast<double>(items)) * std::exp(noise * random.normal());
}

double truth(double reference) { return kFixed / (kFixed + kPerItem * reference); }

TEST(ShapeEstimator, ErrorCoversTheTruthOverManySeeds) {
  int outside = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    ShapeEstimator shape(2);
    plan::Random random(seed, 0, 0);
    shape.set_reference(64.0);
    for (int k = 0; k < 8; ++k) {
      shape.add(0, k, k < 2 ? 16 : 64, seconds(k < 2 ? 16 : 64, 0.03, random));
      shape.add(1, k, k < 2 ? 80 : 64, seconds(k < 2 ? 80 : 64, 0.03, random));
    }
    shape.fit(0.03);
    outside += std::abs(shape.shape().fixed_fraction - truth(64.0)) > 2.0 * shape.error();
  }
  EXPECT_LT(outside, 24);  // expected are 5 %, or 10 % with a spread of 3
}

TEST(ShapeEstimator, AWildSampleCountsLittle) {
  ShapeEstimator shape(1);
  plan::Random random(4, 0, 0);
  shape.set_reference(64.0);
  for (int k = 0; k < 6; ++k) {
    shape.add(0, k, 64, seconds(64, 0.01, random));
    shape.add(0, k, 16, (k == 2 ? 3.0 : 1.0) * seconds(16, 0.01, random));
  }
  shape.fit(0.01);
  EXPECT_NEAR(shape.shape().fixed_fraction, truth(64.0), 0.05);
}

TEST(ShapeEstimator, StaysNonNegativeWhenSmallSizesAreFasterThanProportional) {
  ShapeEstimator shape(1);
  shape.set_reference(64.0);
  for (int k = 0; k < 10; ++k) {
    shape.add(0, k, 64, 64.0 * 64.0);
    shape.add(0, k, 16, 16.0 * 16.0);
  }
  shape.fit(0.01);
  EXPECT_GE(shape.shape().fixed_fraction, 0.0);
  EXPECT_GT(shape.shape().at(1.0), 0.0);
}

using Seconds = std::vector<double>;

TEST(ReductionCost, LiesOnALineFromOneDeviceThatHasNothingToReduce) {
  ReductionCost cost({}, 4);
  for (int k = 0; k < 2; ++k) cost.record(3, 0.004, 0.1);
  EXPECT_EQ(cost.seconds(), (Seconds{0.0, 0.0, 0.002, 0.004, 0.006}));
}

TEST(ReductionCost, TakesTheMedianOfWhatWasMeasured) {
  ReductionCost cost({0.0, 0.0, 1.0, 2.0}, 3);
  for (const double seconds : {0.5, 0.004, 0.003, 0.004, 0.005}) cost.record(2, seconds, 0.1);
  EXPECT_EQ(cost.seconds(), (Seconds{0.0, 0.0, 0.004, 2.0})) << "what is given counts where nothing was measured";
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include "balance/estimator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include <paceline/sim/box.hpp>
#include <paceline/sim/random.hpp>

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
        sim::Random random(seed, static_cast<std::uint64_t>(step), i);
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

TEST(Estimator, DropsALoneOutlier) {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(10, {64, 64});
  const double before = feed.estimator.devices()[0].own_scale;
  feed.run(1, {64, 64}, [](std::int64_t, std::size_t i) { return i == 0 ? 1.5 : 1.0; });
  EXPECT_NEAR(feed.estimator.devices()[0].own_scale / before, 1.0, 0.001);
  EXPECT_EQ(feed.estimator.devices()[0].samples, 10u);
  EXPECT_TRUE(feed.estimator.doubtful(0));
  feed.run(1, {64, 64});
  EXPECT_FALSE(feed.estimator.doubtful(0));
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 0);
}

TEST(Estimator, TakesTwoOutliersOnOneSideAsALevelShift) {
  Feed feed{Estimator(profiles(2)), 0.01};
  feed.run(10, {64, 64});
  const double before = feed.estimator.devices()[0].own_scale;
  feed.run(2, {64, 64}, [](std::int64_t, std::size_t i) { return i == 0 ? 2.0 : 1.0; });
  const DeviceEstimate& changed = feed.estimator.devices()[0];
  EXPECT_EQ(changed.change_points, 1);
  EXPECT_EQ(changed.samples, 2u);
  EXPECT_EQ(changed.since_step, 10);
  EXPECT_NEAR(changed.own_scale / before, 2.0, 0.05);
  EXPECT_EQ(feed.estimator.devices()[1].change_points, 0);
}

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

TEST(Estimator, TakesOutliersOnBothSidesAsNoise) {
  Feed feed{Estimator(profiles(1)), 0.01};
  feed.run(10, {64});
  feed.run(6, {64}, [](std::int64_t step, std::size_t) { return step % 2 == 0 ? 1.5 : 0.6; });
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

TEST(Estimator, EqualDevicesShareOneScaleUntilTheyDiffer) {
  int steps_apart = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    Feed feed{Estimator(profiles(8)), 0.03, seed};
    feed.run(1, std::vector<std::int64_t>(8, 64));
    for (int k = 0; k < 100; ++k) {
      feed.run(1, std::vector<std::int64_t>(8, 64));
      std::size_t last = 0;
      for (const DeviceEstimate& device : feed.estimator.devices()) last = std::max(last, device.cluster);
      steps_apart += last > 0;
    }
  }
  // 3 standard errors of a difference, 28 pairs, few independent looks: separations are rare. Judging groups by the
  // errors of their means separated them in every third run.
  EXPECT_LT(steps_apart, 30) << "of 3000";
}

TEST(Estimator, TellsASlowDeviceFromItsClass) {
  Feed feed{Estimator(profiles(8)), 0.03};
  feed.run(40, std::vector<std::int64_t>(8, 64), [](std::int64_t, std::size_t i) { return i == 5 ? 1.1 : 1.0; });
  const auto& devices = feed.estimator.devices();
  EXPECT_NE(devices[5].cluster, devices[0].cluster);
  EXPECT_EQ(devices[4].cluster, devices[0].cluster);
  EXPECT_NEAR(devices[5].scale / devices[0].scale, 1.1, 0.03);
}

TEST(Estimator, MeasuresTheNoise) {
  Feed feed{Estimator(profiles(4)), 0.03};
  feed.run(100, {64, 64, 64, 64});
  EXPECT_NEAR(feed.estimator.pooled_noise(), 0.03, 0.006);
  EXPECT_NEAR(feed.estimator.devices()[2].noise, 0.03, 0.01);
}

TEST(Estimator, IgnoresExcludedTimingsAndIdleDevices) {
  Estimator estimator(profiles(2));
  estimator.record(0, {.devices = {{{64, 5.0, true}}, {}}});
  EXPECT_FALSE(estimator.has_evidence());
  estimator.record(1, {.devices = {{{64, 5.0, true}, {64, 0.01}}, {}}});
  EXPECT_TRUE(estimator.has_evidence());
  EXPECT_EQ(estimator.devices()[0].samples, 1u);
  EXPECT_EQ(estimator.devices()[1].samples, 0u);
  EXPECT_NEAR(estimator.model(1).seconds(64), 0.01, 1e-9);  // not measured, so as its class
}

TEST(Estimator, KnowsTheModelFromSeveralMicroBatchSizesPerStep) {
  Estimator estimator(profiles(2));
  for (int k = 0; k < 30; ++k) {
    StepTimings timings;
    for (std::size_t i = 0; i < 2; ++i) {
      std::vector<MicroBatchTiming> runs;
      for (const std::int64_t items : {200, 16, 8}) {
        sim::Random random(7, static_cast<std::uint64_t>(k * 1000 + items), i);
        runs.push_back({items, (0.004 + 0.0001 * static_cast<double>(items)) * std::exp(0.02 * random.normal())});
      }
      timings.devices.push_back(runs);
    }
    estimator.record(k, timings);
  }
  EXPECT_NEAR(estimator.model(0).fixed_seconds(), 0.004, 0.0003);
  EXPECT_NEAR(estimator.model(0).per_item_seconds(), 0.0001, 0.000005);
}

TEST(Estimator, FollowsADriftBelowTheThresholdOfAShift) {
  Feed feed{Estimator(profiles(1)), 0.01};
  feed.run(100, {64});
  const double before = feed.estimator.devices()[0].own_scale;
  feed.run(100, {64}, [](std::int64_t, std::size_t) { return 1.05; });
  EXPECT_EQ(feed.estimator.devices()[0].change_points, 0);
  EXPECT_NEAR(feed.estimator.devices()[0].own_scale / before, 1.05, 0.01);
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

TEST(Estimator, KnowsHowWellItKnowsTheRatioWhateverTheNoiseIs) {
  // Two devices with noise of their own, independent or lasting, plus lasting noise in common.
  for (const bool lasting : {false, true}) {
    double squares = 0.0;
    constexpr int kSeeds = 200;
    for (int seed = 1; seed <= kSeeds; ++seed) {
      sim::BoxOptions options;
      options.devices.resize(2);
      options.noise = 0.07;
      if (lasting) options.lasting_noise = {{0.065, 3.64, false}, {0.06, 40.0, true}};
      options.seed = static_cast<std::uint64_t>(seed);
      sim::Box box(options);
      Estimator estimator(profiles(2));
      for (std::int64_t step = 0; step < 100; ++step) estimator.record(step, box.run(step, {64, 64}).timings);
      const auto& devices = estimator.devices();
      double variance = 0.0;  // over two devices that count as equal: each has the error of both
      for (const DeviceEstimate& device : devices) {
        const double alone = devices[0].cluster == devices[1].cluster ? 2.0 : 1.0;
        variance += alone * device.error * device.error;
      }
      const double difference = std::log(devices[0].own_scale / devices[1].own_scale);
      squares += difference * difference / variance / kSeeds;
    }
    EXPECT_GE(std::sqrt(squares), 0.75) << lasting;
    EXPECT_LE(std::sqrt(squares), 1.35) << lasting;  // 2 if lasting noise is taken for independent noise
  }
}

TEST(Estimator, SeesNoDriftInNoise) {
  std::int64_t drifts = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Feed feed{Estimator(profiles(4)), 0.03};
    feed.seed = seed;
    feed.run(400, {64, 64, 64, 64});
    for (const DeviceEstimate& device : feed.estimator.devices()) drifts += device.drifts;
  }
  EXPECT_LE(drifts, 1);
}

}  // namespace
}  // namespace paceline::balance

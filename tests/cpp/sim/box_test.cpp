// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include <paceline/balance/balancer.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/random.hpp>
#include <paceline/sim/box.hpp>

#include "correlation.hpp"

namespace paceline::sim {
namespace {

using Shares = std::vector<std::int64_t>;

BoxOptions two_devices() {
  BoxOptions options;
  options.devices.resize(2);
  options.devices[0].name = "sim:0";
  options.devices[1].name = "sim:1";
  options.devices[1].speed = 0.5;
  return options;
}

TEST(Random, IsAFunctionOfItsKey) {
  plan::Random a(1, 2, 3);
  plan::Random b(1, 2, 3);
  EXPECT_EQ(a.next(), b.next());
  EXPECT_NE(plan::Random(1, 2, 3).next(), plan::Random(1, 3, 2).next());
  EXPECT_NE(plan::Random(1, 2, 3).next(), plan::Random(2, 1, 3).next());
}

TEST(Random, NormalNumbersHaveTheirMoments) {
  double sum = 0.0;
  double squares = 0.0;
  int beyond = 0;
  constexpr int kCount = 40000;
  for (int k = 0; k < kCount; ++k) {
    const double z = plan::Random(7, static_cast<std::uint64_t>(k), 0).normal();
    sum += z;
    squares += z * z;
    beyond += std::abs(z) > 2.0;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.02);
  EXPECT_NEAR(squares / kCount, 1.0, 0.03);
  EXPECT_NEAR(static_cast<double>(beyond) / kCount, 0.0455, 0.005);
}

TEST(Box, TakesFixedAndPerItemTimeOverSpeed) {
  Box box(two_devices());
  const StepOutcome outcome = box.run(0, {60, 20});
  EXPECT_DOUBLE_EQ(outcome.timings.devices[0][0].seconds, 0.010);
  EXPECT_DOUBLE_EQ(outcome.timings.devices[1][0].seconds, 0.012);
  EXPECT_DOUBLE_EQ(outcome.seconds, 0.012);
  EXPECT_DOUBLE_EQ(box.now(), 0.012);
  box.run(1, {60, 0});
  EXPECT_DOUBLE_EQ(box.now(), 0.022);
}

TEST(Box, ThrottlesFromTheFirstStepToBeforeTheLast) {
  BoxOptions options = two_devices();
  options.throttles = {{0, 3.0, 5, 7}};
  const Box box(options);
  EXPECT_DOUBLE_EQ(box.makespan(4, {60, 0}), 0.010);
  EXPECT_DOUBLE_EQ(box.makespan(5, {60, 0}), 0.030);
  EXPECT_DOUBLE_EQ(box.makespan(6, {60, 0}), 0.030);
  EXPECT_DOUBLE_EQ(box.makespan(7, {60, 0}), 0.010);
}

TEST(Box, IdealIsTheBestOfAllSplits) {
  BoxOptions options = two_devices();
  options.throttles = {{0, 3.0, 5, 7}};
  const Box box(options);
  for (const std::int64_t step : {0, 5}) {
    double best = std::numeric_limits<double>::infinity();
    for (std::int64_t n = 0; n <= 200; ++n) best = std::min(best, box.makespan(step, {n, 200 - n}));
    EXPECT_DOUBLE_EQ(box.ideal(step, 200), best);
  }
}

TEST(Box, NoiseDoesNotDependOnWhatElseRan) {
  BoxOptions options = two_devices();
  options.noise = 0.05;
  options.seed = 9;
  Box one(options);
  Box other(options);
  for (std::int64_t k = 0; k < 10; ++k) one.run(k, {50, 50});
  const double late = one.run(10, {80, 10}).timings.devices[0][0].seconds;
  EXPECT_DOUBLE_EQ(other.run(10, {80, 60}).timings.devices[0][0].seconds, late);
  options.seed = 10;
  EXPECT_NE(Box(options).run(10, {80, 10}).timings.devices[0][0].seconds, late);
}

TEST(Box, LastingNoiseIsAsLargeAndLastsAsLongAsAsked) {
  BoxOptions options = two_devices();
  options.devices[1].speed = 1.0;
  options.noise = 0.06;
  options.lasting_noise = {{0.08, 4.0, false}, {0.10, 30.0, true}};
  Box box(options);
  std::vector<double> first;
  std::vector<double> ratio;
  for (std::int64_t step = 0; step < 40000; ++step) {
    const balance::StepTimings timings = box.run(step, {60, 60}).timings;
    first.push_back(std::log(timings.devices[0][0].seconds));
    ratio.push_back(first.back() - std::log(timings.devices[1][0].seconds));
  }
  const double own = 0.08 * 0.08;
  const double common = 0.10 * 0.10;
  const double all = own + common + 0.06 * 0.06;
  EXPECT_NEAR(covariance(first, 0), all, 0.1 * all);
  EXPECT_NEAR(covariance(ratio, 0), 2.0 * (all - common), 0.1 * all) << "what is common cancels";
  for (const std::size_t lag : {1u, 4u, 20u}) {
    const auto steps = static_cast<double>(lag);
    const double lasting = own * std::exp(-steps / 4.0);
    EXPECT_NEAR(correlation(first, lag), (lasting + common * std::exp(-steps / 30.0)) / all, 0.05) << lag;
    EXPECT_NEAR(correlation(ratio, lag), lasting / (all - common), 0.05) << lag;
  }
}

TEST(Box, LastingNoiseDoesNotDependOnWhichStepsRan) {
  BoxOptions options = two_devices();
  options.lasting_noise = {{0.1, 20.0, false}, {0.1, 20.0, true}};
  Box each(options);
  Box last(options);
  for (std::int64_t step = 0; step < 30; ++step) each.run(step, {50, 50});
  EXPECT_EQ(each.run(29, {80, 10}).timings.devices[1][0].seconds, last.run(29, {20, 10}).timings.devices[1][0].seconds);
  EXPECT_NE(last.run(28, {20, 10}).timings.devices[1][0].seconds, last.run(29, {20, 10}).timings.devices[1][0].seconds);
}

TEST(Box, SpikesComeAsOftenAsAsked) {
  BoxOptions options = two_devices();
  options.spike_probability = 0.1;
  options.spike_factor = 2.0;
  Box box(options);
  int spikes = 0;
  for (std::int64_t k = 0; k < 5000; ++k) spikes += box.run(k, {60, 0}).seconds > 0.015;
  EXPECT_NEAR(spikes / 5000.0, 0.1, 0.02);
}

TEST(Box, AFailedDeviceLosesTheStepAndIsNamed) {
  BoxOptions options = two_devices();
  options.failures = {{1, 3}};
  Box box(options);
  EXPECT_FALSE(box.run(2, {50, 50}).failed_device);
  const double before = box.now();
  const StepOutcome outcome = box.run(3, {50, 50});
  EXPECT_EQ(outcome.failed_device, std::optional<std::size_t>(1));
  EXPECT_TRUE(outcome.timings.devices.empty());
  EXPECT_GT(box.now(), before);
  EXPECT_FALSE(box.run(3, {100, 0}).failed_device);
  EXPECT_DOUBLE_EQ(box.ideal(3, 100), box.makespan(3, {100, 0}));
}

TEST(Box, RefusesEventsThatMakeNoSense) {
  const auto refused = [](auto change) {
    BoxOptions options = two_devices();
    change(options);
    EXPECT_THROW(Box{options}, InvalidArgument);
  };
  refused([](BoxOptions& o) { o.devices.clear(); });
  refused([](BoxOptions& o) { o.devices[0].speed = 0.0; });
  refused([](BoxOptions& o) { o.devices[0].fixed_seconds = o.devices[0].per_item_seconds = 0.0; });
  refused([](BoxOptions& o) { o.noise = -0.1; });
  refused([](BoxOptions& o) { o.lasting_noise = {{-0.1, 10.0, false}}; });
  refused([](BoxOptions& o) { o.lasting_noise = {{0.1, 0.0, false}}; });
  refused([](BoxOptions& o) { o.spike_probability = 1.5; });
  refused([](BoxOptions& o) { o.throttles = {{2, 2.0, 0, 1}}; });
  refused([](BoxOptions& o) { o.throttles = {{0, 0.0, 0, 1}}; });
  refused([](BoxOptions& o) { o.throttles = {{0, 2.0, 5, 5}}; });
  refused([](BoxOptions& o) { o.failures = {{7, 0}}; });
  refused([](BoxOptions& o) { o.drifts = {{2, 1.0, 1.5, 0, 10}}; });
  refused([](BoxOptions& o) { o.drifts = {{0, 0.0, 1.5, 0, 10}}; });
  refused([](BoxOptions& o) { o.drifts = {{0, 1.0, 1.5, 10, 10}}; });
  refused([](BoxOptions& o) { o.pauses = {{2, 1.0, 0, 0}}; });
  refused([](BoxOptions& o) { o.pauses = {{0, -1.0, 0, 0}}; });
  refused([](BoxOptions& o) { o.pauses = {{0, 1.0, 0, -1}}; });
  refused([](BoxOptions& o) { o.late_starts = {{2, 1.0, 0, 1}}; });
  refused([](BoxOptions& o) { o.late_starts = {{0, -1.0, 0, 1}}; });
  refused([](BoxOptions& o) { o.late_starts = {{0, 1.0, 1, 1}}; });
  refused([](BoxOptions& o) { o.reduction_seconds = {0.0, 0.0}; });
  refused([](BoxOptions& o) { o.devices[0].first_run_seconds = -1.0; });
}

TEST(Box, DriftsFromOneFactorToAnother) {
  BoxOptions options = two_devices();
  options.drifts = {{0, 2.0, 1.0, 10, 20}};
  const Box box(options);
  const auto seconds = [&](std::int64_t step) { return box.models(step)[0].seconds(60); };
  EXPECT_DOUBLE_EQ(seconds(0), 0.020);
  EXPECT_DOUBLE_EQ(seconds(10), 0.020);
  EXPECT_DOUBLE_EQ(seconds(15), 0.015);
  EXPECT_DOUBLE_EQ(seconds(20), 0.010);
  EXPECT_DOUBLE_EQ(seconds(100), 0.010);
  EXPECT_DOUBLE_EQ(box.models(15)[1].seconds(20), 0.012);
}

TEST(Box, PausesOnceOrEverySoManySteps) {
  BoxOptions options = two_devices();
  options.pauses = {{0, 0.5, 2, 0}, {1, 0.25, 1, 3}};
  Box box(options);
  std::vector<double> first;
  std::vector<double> second;
  for (std::int64_t step = 0; step < 6; ++step) {
    const StepOutcome outcome = box.run(step, {60, 20});
    first.push_back(outcome.timings.devices[0][0].seconds);
    second.push_back(outcome.timings.devices[1][0].seconds);
    EXPECT_DOUBLE_EQ(box.makespan(step, {60, 20}), 0.012) << "no split avoids a pause";
  }
  EXPECT_EQ(first, (std::vector<double>{0.010, 0.010, 0.510, 0.010, 0.010, 0.010}));
  EXPECT_EQ(second, (std::vector<double>{0.012, 0.262, 0.012, 0.012, 0.262, 0.012}));
}

TEST(Box, ChargesStartUpAndReductionToTheStepButNotToTheDevice) {
  BoxOptions options = two_devices();
  options.devices[1].limits.startup_seconds = 0.003;
  options.reduction_seconds = {0.0, 0.001, 0.002};
  Box box(options);
  const StepOutcome both = box.run(0, {60, 20});
  EXPECT_DOUBLE_EQ(both.timings.devices[1][0].seconds, 0.012);
  EXPECT_DOUBLE_EQ(both.timings.step_seconds, 0.015);
  EXPECT_DOUBLE_EQ(both.seconds, 0.017);
  EXPECT_DOUBLE_EQ(box.makespan(0, {60, 20}), 0.017);
  EXPECT_DOUBLE_EQ(box.makespan(0, {60, 0}), 0.011);
}

TEST(Box, TheOracleLeavesOutWhatDoesNotPay) {
  BoxOptions options = two_devices();
  options.reduction_seconds = {0.0, 0.0, 0.010};
  const Box box(options);
  EXPECT_EQ(box.best_split(0, 60), (Shares{60, 0}));
  EXPECT_DOUBLE_EQ(box.ideal(0, 60), 0.010);
  EXPECT_GT(box.best_split(0, 600)[1], 0);
}

TEST(Box, ChargesTheFirstRunOfEachSizeAndSaysSo) {
  BoxOptions options = two_devices();
  options.devices[0].first_run_seconds = 1.0;
  Box box(options);
  const auto first = [&](std::int64_t step, std::int64_t share) {
    return box.run(step, {share, 20}).timings.devices[0][0];
  };
  EXPECT_EQ(first(0, 60), (balance::MicroBatchTiming{60, 1.010, true}));
  EXPECT_EQ(first(1, 60), (balance::MicroBatchTiming{60, 0.010, false}));
  EXPECT_TRUE(first(2, 50).excluded);
  EXPECT_FALSE(first(3, 60).excluded);
}

TEST(Box, ADeviceThatBeginsLateFinishesLateAndSaysHowLate) {
  BoxOptions options = two_devices();
  options.late_starts = {{1, 0.005, 1, 3}};
  Box box(options);
  const auto run = [&](std::int64_t step) { return box.run(step, {60, 20}); };
  EXPECT_DOUBLE_EQ(run(0).seconds, 0.012);
  const StepOutcome late = run(1);
  EXPECT_DOUBLE_EQ(late.seconds, 0.017);
  EXPECT_DOUBLE_EQ(late.timings.devices[1][0].seconds, 0.012);
  EXPECT_EQ(late.timings.startup_seconds, (std::vector<std::optional<double>>{0.0, 0.005}));
  EXPECT_EQ(box.run(2, {60, 0}).timings.startup_seconds, (std::vector<std::optional<double>>{0.0, std::nullopt}));
  EXPECT_DOUBLE_EQ(run(3).seconds, 0.012);
  EXPECT_DOUBLE_EQ(box.makespan(1, {60, 20}), 0.017);
  EXPECT_LT(box.best_split(1, 80)[1], box.best_split(0, 80)[1]);
}

constexpr std::int64_t kArrivalSteps = 300;
constexpr std::int64_t kArrivalSettled = 100;
constexpr std::int64_t kBatch = 256;
constexpr std::size_t kGpus = 4;

/// How much longer steps take than with the best split, once settled. `told`: the arrivals are measured.
/// `lowest_speed`: of the devices, which are all equal, in the end.
double loss(bool told, double& lowest_speed) {
  BoxOptions options;
  balance::BalancerOptions devices;
  for (std::size_t i = 0; i < kGpus; ++i) {
    SimDevice device;
    device.name = "cuda:" + std::to_string(i);
    options.devices.push_back(device);
    devices.devices.push_back({device.name, "gpu", {}});
    if (i > 0) options.late_starts.push_back({i, 0.002 * static_cast<double>(i), 0, kArrivalSteps});
  }
  options.noise = 0.02;
  options.seed = 1;
  Box box(options);
  balance::Balancer balancer(devices);
  double ideal = 0.0;
  double used = 0.0;
  for (std::int64_t step = 0; step < kArrivalSteps; ++step) {
    const balance::StepPlan plan = balancer.next_plan(kBatch);
    if (step >= kArrivalSettled) {
      ideal += box.ideal(step, kBatch);
      used += box.makespan(step, plan.shares);
    }
    balance::StepTimings timings = box.run(step, plan.shares).timings;
    if (!told) timings.startup_seconds.clear();
    balancer.record(timings);
  }
  lowest_speed = 1.0;
  for (const balance::DeviceReport& each : balancer.report().devices) lowest_speed = std::min(lowest_speed, each.speed);
  return used / ideal - 1.0;
}

TEST(Arrival, IsAPartOfThePlanAndNotOfTheSpeed) {
  double lowest_speed = 0.0;
  EXPECT_LE(loss(true, lowest_speed), 0.02);
  EXPECT_GE(lowest_speed, 0.97);
  EXPECT_GE(loss(false, lowest_speed), 0.05) << "what nobody measures is lost";
}

}  // namespace
}  // namespace paceline::sim

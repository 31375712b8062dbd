// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>
#include <paceline/plan/pool_scale.hpp>

#include "draws.hpp"

namespace paceline::plan {
namespace {

using testing::Draws;

constexpr double kNever = std::numeric_limits<double>::infinity();

/// By recursion over the devices.
double least_price(const std::vector<ScaleDevice>& devices, const std::vector<bool>& must, const std::vector<bool>& may,
                   const ScaleDemand& demand, double wait, std::size_t at = 0, double price = 0.0,
                   std::vector<double> speeds = {}) {
  if (at == devices.size()) return predicted_wait(speeds, demand) <= wait ? price : kNever;
  double least = kNever;
  const ScaleDevice& one = devices[at];
  if (!one.usable || !must[at]) least = least_price(devices, must, may, demand, wait, at + 1, price, speeds);
  if (one.usable && (must[at] || may[at])) {
    speeds.push_back(one.speed);
    least = std::min(least, least_price(devices, must, may, demand, wait, at + 1, price + one.price, speeds));
  }
  return least;
}

TEST(WithCovers, AddsWhatIsUsableActiveAndCheapAndNoMoreThanCoversNeed) {
  const std::vector<ScaleDevice> devices = {{.price = 9.0},
                                            {.speed = 2.0, .price = 1.0, .active = false},
                                            {.price = 1.0, .active = false},
                                            {.price = 0.1, .usable = false},
                                            {.price = 8.0}};
  const std::vector<bool> none(5);
  const std::vector<bool> all(5, true);
  using Set = std::vector<bool>;
  const auto covered = [&](const Set& wanted, std::vector<PoolCover> covers) {
    return with_covers(wanted, devices, covers);
  };
  EXPECT_EQ(covered(none, {}), none);
  EXPECT_EQ(covered(none, {{all, 1}}), (Set{false, false, false, false, true})) << "active, and cheaper";
  EXPECT_EQ(covered(none, {{all, 3}}), (Set{true, true, false, false, true})) << "then the cheapest for its speed";
  EXPECT_EQ(covered(none, {{all, 9}}), all) << "what cannot be used at last";
  EXPECT_EQ(covered({false, false, true, false, false}, {{all, 1}}), (Set{false, false, true, false, false}));
  EXPECT_EQ(covered(none, {{{false, false, true, true, false}, 1}, {all, 1}}), (Set{false, false, true, false, false}))
      << "a device serves every cover that it is in";
  EXPECT_EQ(covered({true, false, false, false, false}, {{none, 2}}), (Set{true, false, false, false, false}));
  EXPECT_THROW((void)covered(none, {{{true}, 1}}), InvalidArgument);
  EXPECT_THROW((void)covered({true}, {{all, 1}}), InvalidArgument);
  EXPECT_THROW((void)covered({true}, {}), InvalidArgument);
}

TEST(LeastDevices, CostAsLittleAsAllSetsThatWereTried) {
  int found = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Draws draws(seed);
    std::vector<ScaleDevice> devices(draws.count(1, 7));
    std::vector<bool> must(devices.size());
    std::vector<bool> may(devices.size());
    for (std::size_t d = 0; d < devices.size(); ++d) {
      devices[d] = {.speed = draws.real(0.1, 2.0), .price = draws.real(0.1, 2.0), .usable = draws.chance(0.9)};
      must[d] = draws.chance(0.2);
      may[d] = draws.chance(0.8);
    }
    const ScaleDemand demand{.work_per_second = draws.real(0.0, 4.0),
                             .run_seconds = draws.real(0.01, 0.3),
                             .backlog = draws.chance(0.5) ? draws.real(0.0, 0.5) : 0.0};
    const double wait = draws.real(0.02, 0.5);
    const std::vector<bool> set = least_devices(devices, must, may, demand, wait);
    std::vector<double> speeds;
    double price = 0.0;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      EXPECT_TRUE(!set[d] || (devices[d].usable && (must[d] || may[d])));
      EXPECT_TRUE(set[d] || !must[d] || !devices[d].usable);
      if (!set[d]) continue;
      speeds.push_back(devices[d].speed);
      price += devices[d].price;
    }
    const double least = least_price(devices, must, may, demand, wait);
    if (least == kNever) {
      for (std::size_t d = 0; d < devices.size(); ++d) EXPECT_TRUE(set[d] || !devices[d].usable || !may[d]);
    } else {
      ++found;
      EXPECT_LE(predicted_wait(speeds, demand), wait) << seed;
      EXPECT_NEAR(price, least, 1e-12) << seed;
    }
  }
  EXPECT_GT(found, 100);
}

TEST(LeastDevices, OfManyAreThoseOfTheLeastPriceForTheirSpeed) {
  std::vector<ScaleDevice> devices(40, {.speed = 1.0, .price = 1.0});
  for (std::size_t d = 0; d < 10; ++d) devices[4 * d].price = 0.5;
  const std::vector<bool> none(40);
  const std::vector<bool> all(40, true);
  const std::vector<bool> set = least_devices(devices, none, all, {.work_per_second = 7.5, .run_seconds = 0.01}, 0.1);
  for (std::size_t d = 0; d < 40; ++d) EXPECT_EQ(set[d], d % 4 == 0 && d < 32) << d;
}

class ScaledBox {
 public:
  explicit ScaledBox(std::vector<ScaleDevice> of) : devices(std::move(of)) {}

  std::size_t tick(double work, double waiting = 0.0) {
    const std::vector<bool> wanted =
        scaler.decide(devices, {.arrived_work = work, .arrived_jobs = work / 0.05, .waiting_work = waiting});
    std::size_t active = 0;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      devices[d].active = wanted[d];
      active += wanted[d] ? 1 : 0;
    }
    return active;
  }

  std::vector<ScaleDevice> devices;
  Scaler scaler;
};

TEST(Scaler, AddsAtOnceAndRemovesAfterAsLongAsAnActivationTakes) {
  ScaledBox box(std::vector<ScaleDevice>(8, {.activation_seconds = 5.0, .keep_seconds = 5.0, .active = false}));
  for (int t = 0; t < 20; ++t) EXPECT_EQ(box.tick(0.0), 1U);
  EXPECT_GT(box.tick(3.0, 20.0), 2U) << "twenty seconds of work wait";
  for (int t = 0; t < 300; ++t) (void)box.tick(3.0);
  const std::size_t steady = box.tick(3.0);
  EXPECT_EQ(steady, 4U);  // three would have no time to spare
  std::size_t kept = 0;
  while (box.tick(0.0) == steady) ++kept;
  EXPECT_GE(kept, 4U) << "a device that was needed a moment ago";
  for (int t = 0; t < 300; ++t) (void)box.tick(0.0);
  EXPECT_EQ(box.tick(0.0), 1U) << "the last one stays";
}

TEST(Scaler, ForecastsOverTheSecondsOfAnActivation) {
  ScaledBox slow(std::vector<ScaleDevice>(8, {.activation_seconds = 30.0, .keep_seconds = 30.0, .active = false}));
  ScaledBox fast(std::vector<ScaleDevice>(8, {.activation_seconds = 0.0, .active = false}));
  bool earlier = false;
  for (int t = 0; t < 100; ++t) {
    const double work = 0.03 * t;  // grows by 0.9 within the activation
    const std::size_t with_load = slow.tick(work);
    const std::size_t without = fast.tick(work);
    EXPECT_GE(with_load, without) << t;
    earlier = earlier || with_load > without;
  }
  EXPECT_TRUE(earlier);
  EXPECT_GT(slow.scaler.demand().work_per_second, fast.scaler.demand().work_per_second + 0.5);
}

TEST(Scaler, FollowsATrendOnlyWhereItStandsOutOfTheNoise) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Draws draws(seed);
    ScaledBox slow(std::vector<ScaleDevice>(8, {.activation_seconds = 30.0, .keep_seconds = 30.0}));
    ScaledBox fast(std::vector<ScaleDevice>(8));
    const auto ahead = [&](double jobs) {  // what the forecast adds over the seconds of an activation
      double work = 0.0;
      for (int n = 0; n < 200; ++n) work += draws.chance(jobs / 200.0) ? 0.05 : 0.0;
      (void)slow.tick(work);
      (void)fast.tick(work);
      return slow.scaler.demand().work_per_second - fast.scaler.demand().work_per_second;
    };
    for (int t = 0; t < 60; ++t) (void)ahead(40.0);
    int followed = 0;
    for (int t = 0; t < 600; ++t) followed += ahead(40.0) != 0.0 ? 1 : 0;
    EXPECT_LT(followed, 60) << seed << ": the same comes all the time";
    double most = 0.0;
    for (int t = 0; t < 40; ++t) most = std::max(most, ahead(40.0 + 0.55 * t));
    EXPECT_GT(most, 0.4) << seed << ": 0.0275 more each second";
  }
}

TEST(Scaler, LeavesWhatIsNotUsableAndSaysHowManyWouldDo) {
  ScaledBox box(std::vector<ScaleDevice>(2, {.active = false}));
  for (int t = 0; t < 200; ++t) (void)box.tick(5.3);
  EXPECT_EQ(box.tick(5.3), 2U);
  EXPECT_EQ(box.scaler.desired(), 6U);
  EXPECT_EQ(box.scaler.wait_seconds(), kNever);
  box.devices[0].usable = false;
  EXPECT_EQ(box.tick(0.1), 1U);
  EXPECT_TRUE(box.devices[1].active);
  box.devices[1].usable = false;
  EXPECT_EQ(box.tick(0.1), 0U);
  box.devices[1].usable = true;
  EXPECT_EQ(box.tick(0.0), 1U);
}

TEST(Scaler, DependsOnTimeAndNotOnTheNumberOfTicks) {
  ScaledBox box(std::vector<ScaleDevice>(2));
  Scaler often, seldom;
  for (int t = 0; t < 60; ++t) (void)often.decide(box.devices, {.arrived_work = t < 30 ? 1.0 : 2.0});
  for (int t = 0; t < 6; ++t) (void)seldom.decide(box.devices, {.seconds = 10.0, .arrived_work = t < 3 ? 10.0 : 20.0});
  EXPECT_NEAR(often.demand().work_per_second, seldom.demand().work_per_second, 0.15);
}

TEST(Scaler, RefusesWhatIsNoTargetAndNoTick) {
  EXPECT_THROW(Scaler({.wait_seconds = 0.0}), InvalidArgument);
  EXPECT_THROW(Scaler({.level_gain = 1.5}), InvalidArgument);
  EXPECT_THROW(Scaler({.trend_gain = -0.1}), InvalidArgument);
  const std::vector<ScaleDevice> devices(1);
  EXPECT_THROW((void)Scaler().decide(devices, {.seconds = 0.0}), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
//
// What deadlines count on: the rules one by one, with released devices and without.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

using Cover = std::pair<std::vector<bool>, std::size_t>;

// A model that loads in 1 s, and a margin of 2: the job counts as 4 s on device 1, and as 5 s on device 2.
struct Loading : Released {
  explicit Loading(double first)
      : Released(5.0, {first, 1.0, 1.5}, {.margin = 2.0}, {.name = "work", .model = "m", .reload_seconds = 1.0}) {}
};

TEST(PoolReleased, CountWithTheLoadOfTheModelAndTheMargin) {
  for (const std::int64_t gang : {1, 2}) {
    Loading box(gang == 1 ? 20.0 : 1.0);
    (void)box.submit(0.0, {.deadline_seconds = 8.9, .gang = gang});
    EXPECT_TRUE(box.rejected()) << gang;
    (void)box.submit(0.0, {.deadline_seconds = 9.5, .gang = gang});
    EXPECT_TRUE(box.last.ends.empty()) << gang;
    EXPECT_EQ(box.covers().front(), (Cover{{gang == 2, true, false}, static_cast<std::size_t>(gang)}))
        << "the last one would be late";
  }
}

TEST(PoolReleased, AreJudgedAloneIfNoActiveDeviceMayRunTheJob) {
  Released box;
  (void)box.pool.retire(0.0, 0);
  (void)box.submit(0.0, {.deadline_seconds = 5.9});
  EXPECT_TRUE(box.rejected());
  (void)box.submit(0.0, {.deadline_seconds = 6.0});
  EXPECT_TRUE(box.last.ends.empty());
}

TEST(PoolReleased, CountFromWhenTheJobIsDue) {
  Released box;
  (void)box.submit(0.0, {.deadline_seconds = 15.9, .not_before_seconds = 10.0});
  EXPECT_TRUE(box.rejected()) << "nobody wants the device before";
  (void)box.submit(0.0, {.deadline_seconds = 16.0, .not_before_seconds = 10.0});
  EXPECT_TRUE(box.last.ends.empty());
}

TEST(PoolReleased, CountAnewWhenTheyAreReleasedAgain) {
  Released box;
  (void)box.submit(0.0, {.deadline_seconds = 7.0});
  box.last = box.pool.restore(5.0, 1);
  ASSERT_EQ(devices_of(box.last), Devices{1});
  (void)box.submit(5.5, {.deadline_seconds = 9.5});
  box.last = box.pool.retire(5.7, 1, true, 5.0);
  EXPECT_TRUE(box.last.wants_devices);
  (void)box.submit(5.8, {.deadline_seconds = 5.8});
  EXPECT_TRUE(box.rejected()) << "it is wanted since 5.7, and not since 0";
  (void)box.submit(5.8, {.deadline_seconds = 6.0});
  EXPECT_TRUE(box.last.ends.empty());
}

TEST(PoolReleased, AJobWhoseActiveDeviceGoesExpiresAtOnceIfTheyComeTooLate) {
  for (const double deadline : {9.4, 9.6}) {
    Released box(5.0, {1.0, 1.0});
    (void)box.submit(0.0);
    (void)box.submit(0.0, {.deadline_seconds = deadline});
    EXPECT_FALSE(box.last.wants_devices);
    box.last = box.pool.retire(3.5, 0);
    EXPECT_EQ(box.expired(), deadline < 9.5);
    EXPECT_EQ(box.last.wants_devices, deadline > 9.5);
  }
  Released box(5.0, {1.0, 1.0});
  (void)box.submit(0.0);
  (void)box.submit(0.0, {.deadline_seconds = 20.0, .gang = 2});
  EXPECT_TRUE(box.last.wants_devices);
  (void)box.submit(0.1, {.deadline_seconds = 3.0});
  box.last = box.pool.retire(0.5, 0);
  EXPECT_TRUE(box.expired()) << "the other device is on its way, and comes too late";
}

TEST(PoolReleased, GangsCountOnThoseThatMayRunThem) {
  Released box(5.0, {1.0, 1.0, 1.0}, Released::exact(), {.name = "work", .peak_bytes = 100.0});
  (void)box.pool.restore(0.0, 1);
  const std::size_t small = box.pool.device_count();
  (void)box.pool.add_device(0.0, {.name = "small", .labels = {"ours"}, .memory_bytes = 10.0});
  (void)box.pool.measure(0.0, small, 0, CostModel::affine(0.0, 1.0), 3);
  const std::size_t others =
      box.pool.add_need({.accepts = [](const PoolDevice& device) { return device.name != "d0"; }});
  (void)box.submit(0.0, {.need = others, .deadline_seconds = 5.9, .gang = 2});
  EXPECT_TRUE(box.rejected());
  (void)box.submit(0.0, {.need = others, .deadline_seconds = 6.1, .gang = 2});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_EQ(box.covers().front(), (Cover{{false, true, true, false}, 2}));
}

TEST(PoolReleased, AGangThatNeedsSeveralCountsFromTheLastThatIsWanted) {
  Released box(5.0, {1.0, 1.0, 1.0});
  const std::size_t second = box.pool.add_need({.labels = {"d1"}});
  (void)box.submit(0.0, {.need = second, .deadline_seconds = 20.0});
  EXPECT_TRUE(box.last.wants_devices);
  (void)box.submit(3.0, {.deadline_seconds = 5.9, .gang = 3});
  EXPECT_TRUE(box.rejected());
  (void)box.submit(3.0, {.deadline_seconds = 7.0, .gang = 3});
  EXPECT_TRUE(box.last.ends.empty());
}

TEST(PoolReleased, AGangWaitsUntilItsDeadlineForDevicesOfWhichNothingIsKnown) {
  Box box({1.0, 1.0});
  (void)box.pool.retire(0.0, 1);
  (void)box.submit(0.0, {.deadline_seconds = 100.0, .gang = 2});
  EXPECT_TRUE(box.last.ends.empty()) << "the other one may be restored";
  EXPECT_TRUE(box.pool.tick(99.0).ends.empty());
  EXPECT_EQ(box.pool.tick(101.0).ends.size(), 1U);
}

TEST(PoolReleased, AGangWantsNoneThatItDoesNotNeed) {
  Released box(5.0, {1.0, 1.0, 1.0, 1.0});
  (void)box.pool.restore(0.0, 1);
  const std::size_t first = box.pool.add_need({.labels = {"d0"}});
  (void)box.submit(0.0, {.need = first});
  (void)box.submit(0.0, {.deadline_seconds = 9.0, .gang = 2});
  EXPECT_FALSE(box.last.wants_devices) << "active ones are free in time";
  (void)box.submit(0.0, {.gang = 4});
  EXPECT_FALSE(box.last.wants_devices) << "it has no deadline";
}

// Device 0 takes 1 s a job, and others are released: what waits may take 2.5 s.
struct Behind : Released {
  explicit Behind(PoolOptions options = exact()) : Released(0.0, {1.0, 1.0, 1.0}, std::move(options)) {
    pool.want_above(2.5);
  }
  bool wants(double now, const PoolJob& job = {}) {
    (void)submit(now, job);
    return last.wants_devices;
  }
};

TEST(PoolReleased, AreWantedOnceWhenWhatWaitsBeginsToTakeTooLong) {
  Behind box;
  EXPECT_FALSE(box.wants(0.0)) << "it starts";
  const PoolStart first = box.last.starts.front();
  EXPECT_FALSE(box.wants(0.0));
  EXPECT_FALSE(box.wants(0.0)) << "2 s";
  EXPECT_TRUE(box.wants(0.0)) << "3 s";
  EXPECT_FALSE(box.wants(0.0)) << "it was already said";
  box.last = box.pool.restore(0.0, 1);
  EXPECT_FALSE(box.last.wants_devices) << "3 jobs on 2 devices";
  for (int more = 0; more < 2; ++more) EXPECT_FALSE(box.wants(0.0));
  EXPECT_TRUE(box.wants(0.0)) << "6 jobs";
  (void)box.finish(1.0, first);
  EXPECT_FALSE(box.last.wants_devices);
  EXPECT_TRUE(box.wants(1.0)) << "5 jobs were not too many, and 6 are again";
  for (int more = 0; more < 4; ++more) EXPECT_FALSE(box.wants(1.0));
  (void)box.pool.retire(1.0, 1, true, 0.0);
  EXPECT_TRUE(box.pool.restore(1.0, 2).wants_devices) << "10 jobs on 2 devices, with one that is released";
  EXPECT_FALSE(box.pool.restore(1.0, 1).wants_devices) << "none is released";
}

TEST(PoolReleased, AreWantedAgainWhenOneOfThemIsLost) {
  Behind box;
  for (int more = 0; more < 3; ++more) EXPECT_FALSE(box.wants(0.0));
  EXPECT_TRUE(box.wants(0.0)) << "3 s";
  EXPECT_TRUE(box.pool.lose(0.0, 1).wants_devices) << "it may be the one that was to come";
  EXPECT_FALSE(box.pool.lose(0.0, 2).wants_devices) << "none is left";
}

TEST(PoolReleased, AreWantedForWhatNobodyKnowsOnlyIfAllAreBusy) {
  Behind box;
  const std::size_t other = box.pool.add_kind({.name = "other"});
  const std::size_t filling = box.pool.add_kind({.name = "filling", .sizes = {1, 2}, .max_delay_seconds = 1.0});
  EXPECT_FALSE(box.wants(0.0, {.kind = filling})) << "its batch fills, and a device is idle";
  EXPECT_EQ(box.pool.waiting(), 1);
  EXPECT_TRUE(box.wants(0.0, {.kind = other})) << "it starts there";
  EXPECT_EQ(box.pool.waiting(), 1);
}

TEST(PoolReleased, AreWantedForWhatOnlyTheyMayRun) {
  for (const bool owners : {false, true}) {  // whose owner has retired one
    for (const std::int64_t gang : {1, 3}) {
      Behind box;
      if (owners) (void)box.pool.retire(0.0, 1);
      const std::size_t second = box.pool.add_need({.labels = {"d1"}});
      EXPECT_EQ(box.wants(0.0, {.need = gang == 1 ? second : 0, .gang = gang}), !owners) << gang;
    }
  }
}

TEST(PoolReleased, AreWantedForGangsThatWaitForOneAnother) {
  Behind box;
  (void)box.pool.restore(0.0, 1);
  for (int gang = 0; gang < 3; ++gang) EXPECT_FALSE(box.wants(0.0, {.gang = 2}));
  EXPECT_TRUE(box.wants(0.0, {.gang = 2})) << "three gangs of 1 s wait";
}

TEST(PoolReleased, AreWantedForWhatAPlacementHasBoundToActiveDevices) {
  Behind box({.placement = Placement::round_robin, .margin = 1.0});
  (void)box.pool.restore(0.0, 1);
  for (int job = 0; job < 2 + 5; ++job) EXPECT_FALSE(box.wants(0.0));
  EXPECT_TRUE(box.wants(0.0)) << "three wait for each";
}

TEST(PoolReleased, AreNotWantedForABurstThatAQuotaHoldsBack) {
  for (const std::int64_t quota : {1, 2}) {
    Behind box;
    const std::size_t tenant = box.pool.add_tenant({.name = "ours", .devices = quota});
    bool wants = false;
    for (int job = 0; job < 9; ++job) wants |= box.wants(0.0, {.tenant = tenant});
    EXPECT_FALSE(wants) << "as many run as may: what would run is one job more at most";
    for (int job = 0; job < 3; ++job) wants |= box.wants(0.0);
    EXPECT_TRUE(wants);
  }
}

TEST(PoolReleased, AGangWantsNoneThatDoNotHelpIt) {
  Released box(5.0, {20.0, 1.0});
  (void)box.submit(0.0, {.need = box.pool.add_need({.labels = {"d0"}})});
  (void)box.submit(0.0, {.deadline_seconds = 30.0, .gang = 2});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_FALSE(box.last.wants_devices) << "the other device is busy until 20, and would take 20 more";
}

TEST(PoolReleased, AGangWantsOneMoreThanTheActiveOnesThatAreInTimeAloneAndNotTogether) {
  Released box(3.0, {10.0, 5.0, 2.0});
  (void)box.pool.restore(0.0, 1);
  (void)box.submit(0.0, {.need = box.pool.add_need({.labels = {"d1"}})});
  (void)box.submit(0.0, {.deadline_seconds = 12.0, .gang = 2});
  EXPECT_TRUE(box.last.wants_devices) << "the second one begins at 5, and the first one takes 10";
  EXPECT_EQ(box.covers().front(), (Cover{{true, true, true}, 3}));
}

TEST(PoolReleased, AGangWantsOneMoreWhenAnActiveDeviceGoes) {
  Released box(5.0, {1.0, 1.0, 1.0, 1.0, 1.0});
  (void)box.pool.restore(0.0, 1);
  (void)box.submit(0.0, {.deadline_seconds = 20.0, .gang = 3});
  EXPECT_TRUE(box.last.wants_devices);
  EXPECT_TRUE(box.pool.retire(1.0, 1).wants_devices);
  EXPECT_FALSE(box.pool.tick(1.1).wants_devices);
}

TEST(PoolReleased, TakeNoTimeFromWhatWaitsForOthers) {
  Released box(2.0, {3.0, 3.0});
  for (int n = 0; n < 4; ++n) (void)box.submit(0.0, {.priority = Priority::interactive});
  (void)box.submit(0.5, {.deadline_seconds = 10.0});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_TRUE(box.last.wants_devices) << "the active device ends three others before";
}

TEST(PoolReleased, ARunThatIsOverdueGoesOnForATenthOfItsTime) {
  Released box(0.1, {3.0, 3.0});
  (void)box.submit(0.0);
  (void)box.submit(0.0, {.deadline_seconds = 6.4});
  EXPECT_FALSE(box.last.wants_devices);
  box.tick(3.2);
  EXPECT_TRUE(box.last.wants_devices);
}

TEST(PoolReleased, JobsShareADeviceThatEndsThemInBatches) {
  Released box(5.0, {10.0, 1.0, 1.0}, Released::exact(), {.name = "work", .sizes = {1, 2, 4}});
  for (const std::size_t d : {1U, 2U}) (void)box.pool.measure(0.0, d, 0, CostModel::affine(1.0, 0.0), 3);
  (void)box.submit(0.0, {.deadline_seconds = 6.9});
  EXPECT_TRUE(box.last.wants_devices);
  (void)box.submit(0.0, {.deadline_seconds = 6.9});
  EXPECT_FALSE(box.last.wants_devices);
}

TEST(PoolReleased, JobsTakeTheDeviceThatEndsThemFirst) {
  Released box(5.0, {10.0, 2.0, 1.0});
  (void)box.submit(0.0, {.deadline_seconds = 8.0});
  (void)box.submit(0.0, {.deadline_seconds = 8.1});
  EXPECT_FALSE(box.last.wants_devices) << "the faster one ends both";
}

TEST(PoolReleased, AnotherOneIsWantedAtTheMomentAtWhichTheFirstIsGivenUp) {
  Released box(5.0, {3.0, 1.0});
  const std::size_t second = box.pool.add_need({.labels = {"d1"}});
  const std::size_t third = box.pool.device_count();
  (void)box.pool.add_device(0.0, {.name = "d2", .device_class = "class 2"});
  (void)box.pool.measure(0.0, third, 0, CostModel::affine(0.0, 3.0), 3);
  (void)box.pool.retire(0.0, third, true, 0.1);
  (void)box.submit(0.0);
  (void)box.submit(0.0, {.need = second, .deadline_seconds = 6.5});
  EXPECT_TRUE(box.last.wants_devices);
  (void)box.submit(0.0, {.deadline_seconds = 8.8});
  EXPECT_FALSE(box.last.wants_devices);
  box.tick(5.6);
  EXPECT_TRUE(box.expired());
  EXPECT_TRUE(box.last.wants_devices);
}

TEST(PoolReleased, TheLastMomentToWantOneIsLookedAtAlsoForLaterJobs) {
  Released box(4.0, {3.0, 3.0});
  (void)box.submit(0.0);
  (void)box.submit(0.0, {.deadline_seconds = 6.1});
  (void)box.submit(0.0, {.deadline_seconds = 9.05});
  EXPECT_FALSE(box.last.wants_devices);
  EXPECT_NEAR(box.last.wake_seconds, 2.0, 1e-9) << "9.05 - 3 - 4, and somewhat earlier: clocks ring late";
}

TEST(PoolReleased, AllThatAreLateExpireAtOnce) {
  Released box;
  (void)box.pool.retire(0.0, 0);
  for (int n = 0; n < 8; ++n) (void)box.submit(0.0, {.deadline_seconds = 1000.0});
  const std::size_t kind = box.pool.add_kind({.name = "other", .queue_limit = 1000});
  for (int n = 0; n < 70; ++n) (void)box.submit(0.0, {.kind = kind, .deadline_seconds = 100.0});
  EXPECT_EQ(box.pool.tick(200.0).ends.size(), 70U);
  EXPECT_EQ(box.pool.tick(2000.0).ends.size(), 8U) << "in another line";
}

TEST(PoolReleased, AreNotWantedForWhatAQuotaHoldsBack) {
  for (const std::int64_t gang : {1, 2}) {
    Released box(5.0, {10.0, 1.0, 1.0});
    const std::size_t small = box.pool.add_tenant({.name = "small", .devices = gang});
    (void)box.submit(0.0, {.tenant = small});
    if (gang == 2) (void)box.submit(0.0, {.tenant = small});
    (void)box.submit(0.0, {.deadline_seconds = 8.0, .gang = gang, .tenant = small});
    EXPECT_TRUE(box.last.ends.empty());
    EXPECT_FALSE(box.last.wants_devices) << "the tenant uses device 0";
  }
}

TEST(PoolReleased, AreWantedAlsoWhereAPlacementBindsIfNoneIsActive) {
  Released box(5.0, {10.0, 1.0}, {.placement = Placement::round_robin, .margin = 1.0});
  (void)box.pool.retire(0.0, 0);
  (void)box.submit(0.0, {.deadline_seconds = 6.5});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_TRUE(box.last.wants_devices);
}

// One of the devices was not measured yet: it takes no time, so far.
struct HalfKnown : Box {
  explicit HalfKnown(bool released) : Box({10.0}, Released::exact(), {.name = "work", .queue_limit = 1000}) {
    const std::size_t unknown = pool.device_count();
    (void)pool.add_device(0.0, {.name = "new", .device_class = "new"});
    last = pool.retire(0.0, released ? unknown : 0, true, 5.0);
    for (int n = 0; n < 40; ++n) (void)submit(0.0, {.priority = Priority::interactive});
  }
};

TEST(PoolReleased, WhatIsNotKnownOfADeviceRefusesNothing) {
  for (const bool released : {false, true}) {
    HalfKnown box(released);
    (void)box.submit(0.0, {.deadline_seconds = 20.0});
    EXPECT_TRUE(box.last.ends.empty()) << released << ": who knows when the 40 jobs before it are done?";
  }
  HalfKnown box(true);
  (void)box.submit(0.0, {.deadline_seconds = 4.0});
  EXPECT_EQ(box.last.ends.size(), 1U) << "device 0 takes longer, and the other one is not there before 5";
}

}  // namespace
}  // namespace paceline::plan::testing

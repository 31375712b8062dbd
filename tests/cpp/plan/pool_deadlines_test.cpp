// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

constexpr double kForEver = std::numeric_limits<double>::infinity();

TEST(PoolDeadlines, AJobThatOnlyAReleasedDeviceEndsInTimeIsTakenAndWantsIt) {
  Released box;
  (void)box.submit(0.0, {.deadline_seconds = 6.0});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_TRUE(box.last.starts.empty()) << "a released device starts nothing, and the slow one cannot end it";
  EXPECT_TRUE(box.last.wants_devices);
  EXPECT_EQ(box.covers().front(), (std::pair(std::vector{false, true}, std::size_t{1})));
  box.last = box.pool.restore(5.0, 1);
  EXPECT_EQ(devices_of(box.last), Devices{1});
}

TEST(PoolDeadlines, AJobForWhichTheActivationTakesTooLongIsRejectedAtOnce) {
  Released box;
  (void)box.submit(0.0, {.deadline_seconds = 5.9});
  EXPECT_TRUE(box.rejected());
  EXPECT_FALSE(box.last.wants_devices);
  Released never(kForEver);
  (void)never.submit(0.0, {.deadline_seconds = 9.0});
  EXPECT_TRUE(never.rejected()) << "a device that is paused otherwise comes back for no deadline";
}

TEST(PoolDeadlines, AJobWaitsForADeviceThatIsWantedUntilItWouldBeTooLateThere) {
  Released box;
  (void)box.submit(0.0, {.deadline_seconds = 7.0});
  EXPECT_NEAR(box.last.wake_seconds, 6.0, 1e-9) << "it is wanted already";
  box.tick(3.0);  // wanted now, the device would come too late
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_NEAR(box.last.wake_seconds, 6.0, 1e-9);
  box.tick(6.0);
  EXPECT_TRUE(box.last.ends.empty());
  box.tick(6.001);
  EXPECT_TRUE(box.expired()) << "it has not come";
}

TEST(PoolDeadlines, ADeviceThatNobodyWantsAnyMoreCountsWithItsWholeActivation) {
  Released box;
  const JobId first = box.submit(0.0, {.deadline_seconds = 7.0});
  (void)box.submit(3.0, {.deadline_seconds = 5.0});
  EXPECT_TRUE(box.last.ends.empty()) << "the device is on its way since 0";
  bool cancelled = false;
  Released other;
  const JobId only = other.submit(0.0, {.deadline_seconds = 7.0});
  other.last = other.pool.cancel(1.0, only, cancelled);
  EXPECT_TRUE(cancelled);
  (void)other.submit(3.0, {.deadline_seconds = 5.0});
  EXPECT_TRUE(other.rejected());
  EXPECT_NE(first, JobId{});
}

TEST(PoolDeadlines, AJobBehindALongRunWantsAReleasedDevice) {
  Released box(2.0, {3.0, 3.0});
  (void)box.submit(0.0);
  EXPECT_EQ(devices_of(box.last), Devices{0});
  EXPECT_FALSE(box.last.wants_devices);
  (void)box.submit(0.5, {.deadline_seconds = 10.0});
  EXPECT_FALSE(box.last.wants_devices) << "the active device is free in time";
  (void)box.submit(0.6, {.deadline_seconds = 5.1});
  EXPECT_TRUE(box.last.wants_devices);
}

TEST(PoolDeadlines, ARunThatLastsTooLongMakesAJobWantAReleasedDeviceWhileItHelps) {
  Released box(2.0, {3.0, 3.0});
  (void)box.submit(0.0);
  (void)box.submit(0.0, {.deadline_seconds = 6.5});
  EXPECT_FALSE(box.last.wants_devices);
  bool wanted = false;
  while (box.last.wake_seconds < 1.6 && !wanted) {  // 6.5 - 3 - 2 is the last moment
    box.tick(box.last.wake_seconds);
    wanted = box.last.wants_devices;
  }
  EXPECT_FALSE(wanted) << "the run ends at 3, as predicted";
  box.tick(3.4);
  EXPECT_TRUE(box.last.ends.empty());
  box.tick(3.6);
  EXPECT_TRUE(box.expired()) << "no device came, and none would be in time";
}

TEST(PoolDeadlines, AsManyDevicesAreNamedAsJobsNeed) {
  Released box(5.0, {10.0, 1.0, 1.0, 1.0});
  (void)box.submit(0.0, {.deadline_seconds = 6.5});
  EXPECT_TRUE(box.last.wants_devices);
  (void)box.submit(0.0, {.deadline_seconds = 6.5});
  EXPECT_TRUE(box.last.wants_devices) << "one device would end one of them";
  (void)box.submit(0.0, {.deadline_seconds = 7.5});
  EXPECT_FALSE(box.last.wants_devices) << "either ends this one after its first";
  std::size_t most = 0;
  for (const auto& [devices, count] : box.covers()) {
    if (!devices[0]) most = std::max(most, count);
  }
  EXPECT_EQ(most, 2U);
}

TEST(PoolDeadlines, AGangWaitsForReleasedDevices) {
  Released box(5.0, {1.0, 1.0, 1.0, 2.5});
  (void)box.submit(0.0, {.deadline_seconds = 5.5, .gang = 2});
  EXPECT_TRUE(box.rejected());
  (void)box.submit(0.0, {.deadline_seconds = 6.5, .gang = 3});
  EXPECT_TRUE(box.last.ends.empty());
  EXPECT_TRUE(box.last.wants_devices);
  EXPECT_EQ(box.covers().front(), (std::pair(std::vector{true, true, true, false}, std::size_t{3})))
      << "the last one would be late";
  box.tick(5.0);
  EXPECT_TRUE(box.last.ends.empty());
  (void)box.pool.restore(5.0, 1);
  box.last = box.pool.restore(5.0, 2);
  EXPECT_EQ(devices_of(box.last), (Devices{0, 1, 2}));
}

TEST(PoolDeadlines, APlacementThatBindsJobsCountsOnNoReleasedDevice) {
  Released box(1.0, {10.0, 1.0}, {.placement = Placement::round_robin, .margin = 1.0});
  (void)box.submit(0.0, {.deadline_seconds = 5.0});
  EXPECT_TRUE(box.rejected()) << "it would be bound to the device that is active";
}

TEST(PoolDeadlines, AReleaseIsInTheLedger) {
  const auto text = std::make_shared<std::ostringstream>();
  PoolState pool;
  (void)pool.add_device(0.0, {.name = "a"});
  pool.write_to(text);
  (void)pool.retire(1.0, 0, true, 2.5);
  (void)pool.retire(2.0, 0, true);
  EXPECT_NE(text->str().find(R"("retire": {"device": 0, "paused": true, "activation_seconds": 2.5})"),
            std::string::npos);
  EXPECT_NE(text->str().find(R"("retire": {"device": 0, "paused": true})"), std::string::npos);
  EXPECT_THROW((void)pool.retire(3.0, 0, true, -1.0), InvalidArgument);
}

// A scaler that restores what covers() names, and releases what is idle, on a virtual clock. One job waits at a time,
// so that all devices can be tried for it.
TEST(PoolDeadlines, EveryJobThatADeviceCouldEndInTimeEndsInTime) {
  int kept = 0;
  int by_released = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Draws draws(seed);
    const std::vector<double> seconds{draws.real(2.0, 8.0), draws.real(0.5, 4.0), draws.real(0.5, 4.0)};
    std::vector<double> activation(seconds.size());
    std::vector<double> there(seconds.size(), 0.0);  // when the device is active
    std::vector<double> free(seconds.size(), 0.0);
    Box box(seconds, Released::exact());
    for (std::size_t d = 1; d < seconds.size(); ++d) {
      activation[d] = draws.real(0.0, 5.0);
      there[d] = kForEver;
      box.last = box.pool.retire(0.0, d, true, activation[d]);
    }
    std::vector<std::pair<double, PoolStart>> runs;
    double next = 0.5;
    double deadline = 0.0;  // of the job that waits or ran last
    bool must_end = false;
    for (double now = 0.0; now < 200.0;) {
      const auto obey = [&] {
        for (const PoolEnd& end : box.last.ends) {
          if (end.outcome != JobOutcome::completed) {
            ASSERT_FALSE(must_end) << "seed " << seed << " at " << now;
          }
        }
        for (const PoolStart& start : box.last.starts) {
          const std::size_t d = start.devices.front();
          free[d] = now + seconds[d];
          ASSERT_LE(free[d], deadline + 1e-9) << "seed " << seed;
          kept += must_end ? 1 : 0;
          must_end = false;
          runs.emplace_back(free[d], start);
        }
        if (!box.last.wants_devices) return;
        const PoolCover cover = box.pool.covers(0.0).front();
        std::size_t d = 0;
        while (!cover.devices[d]) ++d;
        there[d] = std::min(there[d], now + activation[d]);
      };
      obey();
      if (HasFatalFailure()) return;
      double at = std::min(next, box.last.wake_seconds);
      for (const auto& [end, start] : runs) at = std::min(at, end);
      for (const double one : there) at = one > now ? std::min(at, one) : at;
      now = at;
      const auto back = std::ranges::find(there, now);
      const auto ended = std::ranges::find(runs, now, &std::pair<double, PoolStart>::first);
      if (back != there.end()) {
        box.last = box.pool.restore(now, static_cast<std::size_t>(back - there.begin()));
        *back = 0.0;
      } else if (ended != runs.end()) {
        const std::size_t d = ended->second.devices.front();
        (void)box.finish(now, ended->second);
        runs.erase(ended);
        if (d > 0 && box.last.starts.empty() && draws.chance(0.5)) {
          there[d] = kForEver;
          box.last = box.pool.retire(now, d, true, activation[d]);
        }
      } else if (now == next) {
        next += draws.real(0.1, 6.0);
        if (box.pool.waiting() > 0) {
          box.last = box.pool.tick(now);
          continue;
        }
        deadline = now + draws.real(1.0, 15.0);
        for (std::size_t d = 0; d < seconds.size(); ++d) {
          const double begin = there[d] <= now ? std::max(now, free[d]) : std::max(now + activation[d], free[d]);
          must_end = must_end || begin + seconds[d] < deadline - 1e-9;
          if (d == 0 && !must_end) ++by_released;
        }
        (void)box.submit(now, {.deadline_seconds = deadline - now});
      } else {
        box.last = box.pool.tick(now);
      }
    }
  }
  EXPECT_GT(kept, 1000);
  EXPECT_GT(by_released, 1000);
}

}  // namespace
}  // namespace paceline::plan::testing

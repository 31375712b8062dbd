// SPDX-License-Identifier: Apache-2.0
//
// A pool whose jobs report that their device is lost.
#include <gtest/gtest.h>

#include <atomic>
#include <span>
#include <string>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"
#include "pool_jobs.hpp"

namespace paceline {
namespace {

TEST(PoolLostDevices, ALostDeviceIsRetiredAndThePoolGoesOnWithoutIt) {
  Gate gate;
  Pool pool(host_group(2));
  const auto loses = [&](Job& job) {
    gate.pass();
    throw DeviceLost("gone", job.device().name);
  };
  const auto first = pool.submit(loses, {.needs = {"host:0"}});
  const auto waits = pool.submit([](Job&) {}, {.needs = {"host:0"}});
  const auto held = pool.submit([](Job&) {}, {.not_before_seconds = 1e6, .needs = {"host:0"}});
  const auto after = pool.submit([](Job&) {}, {.after = {first}});
  gate.open();
  EXPECT_THROW(first.get(), DeviceLost);
  EXPECT_THROW(waits.get(), DeviceLost);
  EXPECT_THROW(held.get(), DeviceLost);
  EXPECT_THROW(after.get(), Cancelled);
  EXPECT_THROW(pool.submit([](Job&) {}, {.needs = {"host:0"}}).get(), Rejected);
  for (int k = 0; k < 10; ++k) EXPECT_EQ(pool.submit(where_it_ran).get(), "host:1");
  EXPECT_EQ(pool.active(), std::vector<std::string>{"host:1"});
  EXPECT_NE(pool.explain().find("host:0: 0 jobs in 0 runs"), std::string::npos) << pool.explain();
  EXPECT_NE(pool.explain().find("; lost"), std::string::npos) << pool.explain();
}

TEST(PoolLostDevices, WithAllDevicesLostEverythingFailsUntilOneIsRestored) {
  Gate gate;
  std::atomic<bool> well = false;
  Pool pool(host_group(2));
  const auto batch = pool.serve<int, int>([&](Job& job, std::span<int> in, std::span<int> out) {
    gate.pass();
    if (!well) throw DeviceLost("gone", job.device().name);
    out[0] = in[0];
  });
  const auto request = batch.submit(1);
  const auto other = batch.submit(2);
  const auto held = pool.submit([](Job&) {}, {.not_before_seconds = 1e6});
  const auto after = pool.submit([](Job&) {}, {.after = {held}});
  gate.open();
  EXPECT_THROW((void)request.get(), DeviceLost);
  EXPECT_THROW((void)other.get(), DeviceLost);
  EXPECT_THROW(held.get(), DeviceLost);
  EXPECT_THROW(after.get(), DeviceLost);
  EXPECT_THROW((void)pool.submit([](Job&) {}), DeviceLost);
  well = true;
  pool.restore("host:1");
  EXPECT_EQ(batch.submit(3).get(), 3);
  EXPECT_EQ(pool.submit(where_it_ran).get(), "host:1");
}

TEST(PoolLostDevices, ADeviceThatIsOnlyRetiredIsWaitedForWhenTheOtherIsLost) {
  Pool pool(host_group(2));
  pool.retire("host:1");
  EXPECT_THROW(pool.submit([](Job& job) { throw DeviceLost("gone", job.device().name); }).get(), DeviceLost);
  const auto waits = pool.submit(where_it_ran);
  pool.restore("host:1");
  EXPECT_EQ(waits.get(), "host:1");
}

TEST(PoolLostDevices, ABatchRunsElsewhereWhenItsDeviceIsLost) {
  std::atomic<bool> lost = false;
  Pool pool(host_group(2));
  const auto batch = pool.serve<int, std::string>([&](Job& job, std::span<int>, std::span<std::string> out) {
    if (!lost.exchange(true)) throw DeviceLost("gone", job.device().name);
    out[0] = job.device().name;
  });
  const std::string device = batch.submit(1).get();
  EXPECT_NE(pool.explain().find((device == "host:0" ? "host:1" : "host:0") + std::string(": 0 jobs in 0 runs")),
            std::string::npos)
      << pool.explain();
  EXPECT_EQ(pool.submit(where_it_ran).get(), device);
}

TEST(PoolLostDevices, AGangLosesTheDeviceThatItNames) {
  std::string lost;
  Pool pool(host_group(2));
  const auto gang = pool.submit(
      [&](Job& job) {
        lost = job.devices()[1]->name;
        throw DeviceLost("gone", lost);
      },
      {.gang = 2});
  EXPECT_THROW(gang.get(), DeviceLost);
  EXPECT_NE(pool.submit(where_it_ran).get(), lost);
  EXPECT_THROW(pool.submit([](Job&) {}, {.gang = 2}).get(), Rejected);
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// Devices that join a pool later.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>

#include "errors.hpp"
#include "gate.hpp"
#include "host_group.hpp"
#include "pool_jobs.hpp"

namespace paceline {
namespace {

TEST(PoolDevices, ADeviceThatJoinsTakesWhatWaits) {
  Gate gate;
  Pool pool(host_group(1));
  const Future<void> held = pool.submit([&](Job&) { gate.pass(); }, {.kind = "hold"});
  std::vector<Future<std::string>> jobs;
  for (int k = 0; k < 5; ++k) jobs.push_back(pool.submit(where_it_ran));
  pool.add(find_device("host:1"));
  for (const auto& job : jobs) EXPECT_EQ(job.get(), "host:1");
  const Future<std::size_t> both = pool.submit([](Job& job) { return job.devices().size(); }, {.gang = 2});
  gate.open();
  EXPECT_EQ(both.get(), 2U);
  EXPECT_EQ(pool.active(), (std::vector<std::string>{"host:0", "host:1"}));
}

TEST(PoolDevices, WhatJoinsIsRetiredRestoredAndMeasuredLikeTheOthers) {
  Pool pool(host_group(1));
  pool.add(find_device("host:1"));
  auto batcher = pool.serve<int, int>(
      [](Job&, std::span<int> requests, std::span<int> answers) {
        for (std::size_t k = 0; k < requests.size(); ++k) answers[k] = requests[k] + 1;
      },
      {.max_batch = 2});
  pool.add(find_device("host:2"));
  for (int k = 0; k < 60; ++k) EXPECT_EQ(batcher.submit(k).get(), k + 1);
  pool.retire("host:0");
  pool.retire("host:1");
  EXPECT_EQ(pool.submit(where_it_ran).get(), "host:2");
  EXPECT_EQ(batcher.submit(1).report().device, "host:2");
  pool.restore("host:1");
  EXPECT_EQ(pool.submit(where_it_ran, {.needs = {"host:1"}}).get(), "host:1");
  EXPECT_TRUE(says(pool.explain(), "host:2: "));
  EXPECT_TRUE(says(message_of([&] { pool.add(find_device("host:2")); }), "the pool has host:2 already"));
}

TEST(PoolDevices, ADeadlineBringsAReleasedDeviceBackThatIsInTime) {
  std::promise<void> wanted;
  Pool pool(host_group(2));
  const auto ends = [&](double deadline, std::vector<std::string> devices) {
    return pool.submit(where_it_ran, {.kind = "short", .deadline_seconds = deadline, .devices = std::move(devices)});
  };
  for (int k = 0; k < 4; ++k) {  // so that its seconds are known
    EXPECT_EQ(ends(600.0, {"host:0"}).get(), "host:0");
    EXPECT_EQ(ends(600.0, {"host:1"}).get(), "host:1");
  }
  (void)pool.scale_tick();
  ASSERT_TRUE(pool.retire_unless_last("host:1", true, 100.0));
  pool.on_wants_devices([&] { wanted.set_value(); });
  const Future<std::string> late = ends(99.0, {"host:1"});
  EXPECT_TRUE(says(message_of([&] { (void)late.get(); }),
                   "it would end after its deadline, or make another job late that was taken before, and no released "
                   "device is back in time for it"));
  const Future<std::string> job = ends(600.0, {"host:1"});
  wanted.get_future().wait();
  const auto tick = pool.scale_tick(1e6);  // at once all the same
  ASSERT_TRUE(tick.has_value());
  EXPECT_EQ(tick->covers.front(), (std::pair(std::vector{false, true}, std::size_t{1})));
  pool.restore("host:1");
  EXPECT_EQ(job.get(), "host:1");
}

TEST(PoolDevices, ExplainSaysWhichDevicesJobsWaitFor) {
  Pool pool(host_group(3));
  pool.retire("host:1");
  ASSERT_TRUE(pool.retire_unless_last("host:2", true));
  EXPECT_TRUE(says(pool.explain(), "host:1: 0 jobs in 0 runs, 0.000 s; retired\n")) << pool.explain();
  EXPECT_TRUE(says(pool.explain(), "host:2: 0 jobs in 0 runs, 0.000 s; released\n")) << pool.explain();
  EXPECT_TRUE(says(pool.explain(), "0 jobs wait, 0 runs go on")) << pool.explain();
  const auto one = pool.submit(where_it_ran, {.kind = "one", .needs = {"host:1"}});
  EXPECT_TRUE(says(pool.explain(), "'one': 1 job waits for host:1, which takes no work now\n1 job waits, 0 runs go on"))
      << pool.explain();
  const auto same = pool.submit(where_it_ran, {.kind = "one", .needs = {"host:1"}});
  const auto all = pool.submit([](Job& job) { return job.devices().size(); }, {.kind = "all", .gang = 3});
  EXPECT_TRUE(says(pool.explain(), "'one': 2 jobs wait for host:1, which takes no work now\n")) << pool.explain();
  EXPECT_TRUE(says(pool.explain(),
                   "'all': 1 job waits for 3 devices at once, and 1 takes work now: host:1, host:2 take none\n"))
      << pool.explain();
  pool.restore("host:1");
  EXPECT_EQ(one.get(), "host:1");
  EXPECT_EQ(same.get(), "host:1");
  EXPECT_FALSE(says(pool.explain(), "'one': ")) << pool.explain();
  pool.restore("host:2");
  EXPECT_EQ(all.get(), 3U);
  pool.close(true);
  EXPECT_TRUE(says(pool.explain(), "s; closed\n")) << pool.explain();
  EXPECT_FALSE(says(pool.explain(), "; retired")) << pool.explain();
}

TEST(PoolDevices, ExplainTakesTheFiguresOfWhoCountsThem) {
  Pool pool(host_group(2));
  EXPECT_THROW(pool.submit([](Job&) { throw std::runtime_error("no"); }, {.needs = {"host:0"}}).get(),
               std::runtime_error);
  EXPECT_TRUE(says(pool.explain(), "host:0: 0 jobs in 0 runs, ")) << pool.explain();
  const std::string text = pool.explain({{"host:0", {4, 1, 2.5}}});
  EXPECT_TRUE(says(text, "host:0: 4 jobs in 1 run, 2.500 s\nhost:1: 0 jobs in 0 runs, 0.000 s\n")) << text;
}

TEST(PoolDevices, BackgroundJobsAreNoBacklog) {
  Gate gate;
  Pool pool(host_group(1));
  for (int k = 0; k < 4; ++k) pool.submit([](Job&) {}, {.kind = "kind"}).get();
  const Future<void> held = pool.submit([&](Job&) { gate.pass(); }, {.kind = "hold"});
  const auto background = pool.submit([](Job&) {}, {.kind = "kind", .priority = Priority::background});
  EXPECT_EQ(pool.backlog_seconds(), 0.0);
  const auto normal = pool.submit([](Job&) {}, {.kind = "kind"});
  EXPECT_GT(pool.backlog_seconds(), 0.0);
  gate.open();
  normal.get();
  background.get();
}

TEST(PoolDevices, ADeviceJoinsAPoolThatHasLostAllOthers) {
  Pool pool(host_group(1));
  EXPECT_THROW(pool.submit([](Job&) { throw DeviceLost("gone"); }).get(), DeviceLost);
  EXPECT_THROW(pool.submit(where_it_ran), DeviceLost);
  pool.add(find_device("host:1"));
  EXPECT_EQ(pool.submit(where_it_ran).get(), "host:1");
}

TEST(PoolDevices, DevicesJoinWhileThreadsSubmit) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> ran{0};
    Pool pool(host_group(1));
    std::vector<std::thread> threads;
    for (int k = 0; k < 3; ++k) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) pool.submit([&](Job&) { ++ran; });
      });
    }
    for (const char* name : {"host:1", "host:2", "host:3"}) pool.add(find_device(name));
    for (std::thread& thread : threads) thread.join();
    pool.close();
    EXPECT_EQ(ran, 150);
    EXPECT_THROW(pool.add(find_device("host:4")), Unavailable);
  }
}

TEST(PoolDevices, AWorkerThatIsBusyElsewhereHoldsUpNeitherTheAdditionNorTheEnd) {
  for (const bool before : {true, false}) {
    Gate gate;
    std::atomic<bool> inside{false};
    DeviceGroup other(std::vector<Device>{find_device("host:1")});
    std::optional<Pool> pool(host_group(1));
    if (!before) pool->add(find_device("host:1"));
    std::future<void> busy = other.async([&](const Device&) {
      inside = true;
      gate.pass();
    });
    while (!inside) std::this_thread::yield();
    if (before) pool->add(find_device("host:1"));
    EXPECT_EQ(pool->submit(where_it_ran, {.needs = {"host:0"}}).get(), "host:0");
    const auto begin = std::chrono::steady_clock::now();
    pool.reset();
    // A group that is closed while its worker is busy waits ten seconds.
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
    gate.open();
    busy.get();
    EXPECT_EQ(other.async([](const Device& device) { return device.name; }).get(), "host:1");
  }
}

TEST(PoolDevices, ACallOfThenMayAddADevice) {
  std::promise<std::string> told;
  Pool pool(host_group(1));
  pool.submit([](Job&) {}).then([&](const Future<void>&) {
    pool.add(find_device("host:1"));
    pool.submit(where_it_ran, {.needs = {"host:1"}}).then([&](const Future<std::string>& one) {
      told.set_value(one.get());
    });
  });
  EXPECT_EQ(told.get_future().get(), "host:1");
}

}  // namespace
}  // namespace paceline

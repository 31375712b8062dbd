// SPDX-License-Identifier: Apache-2.0
//
// A pool whose workers are lost, busy, closed underneath, or in another process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

TEST(PoolWorkers, AServedKindTakesRequestsOnly) {
  Pool pool(host_group(1));
  const auto same = pool.serve<int, int>([](Job&, std::span<int> in, std::span<int> out) { out[0] = in[0]; });
  EXPECT_THROW((void)pool.submit([](Job&) {}, {.kind = "request"}), InvalidArgument);
  EXPECT_EQ(same.submit(3).get(), 3);
}

TEST(PoolWorkers, ALostDeviceIsRetiredAndThePoolGoesOnWithoutIt) {
  Pool pool(host_group(2));
  const auto loses = [](Job& job) { throw DeviceLost("gone", job.device().name); };
  const auto first = pool.submit(loses, {.needs = {"host:0"}});
  EXPECT_THROW(first.get(), DeviceLost);
  for (int k = 0; k < 10; ++k) EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }).get(), "host:1");
  const auto batch = pool.serve<int, int>([&](Job& job, std::span<int>, std::span<int>) { loses(job); });
  EXPECT_THROW((void)batch.submit(1).get(), DeviceLost);  // and does not run again for ever
  EXPECT_THROW((void)pool.submit([](Job&) {}), DeviceLost);
}

TEST(PoolWorkers, CallsOfThenMaySubmitAfterJobsThatEndedWithTheirOwn) {
  Pool pool(host_group(1));
  Gate gate;
  const auto held = pool.submit([&](Job&) { gate.pass(); });
  const auto batch = pool.serve<int, int>([](Job&, std::span<int> in, std::span<int> out) {
    for (std::size_t k = 0; k < in.size(); ++k) out[k] = in[k];
  });
  const Future<int> a = batch.submit(1);
  const Future<int> b = batch.submit(2);
  std::promise<Future<int>> told;
  a.then([&](const Future<int>&) { told.set_value(pool.submit([](Job&) { return 3; }, {.after = {b}})); });
  gate.open();
  EXPECT_EQ(told.get_future().get().get(), 3);
  a.then([](const Future<int>&) { throw std::runtime_error("dropped"); });
  pool.submit([](Job&) { throw std::runtime_error("bad"); }).then([](const Future<void>& one) { one.get(); });
  pool.close();
}

TEST(PoolWorkers, NobodyWaitsOnAWorker) {
  DeviceGroup group = host_group(1);
  Pool pool(group);
  Gate gate;
  std::promise<int> refused;
  const auto first = pool.submit([&](Job&) { gate.pass(); });
  const auto second = pool.submit([](Job&) {});
  first.then([&](const Future<void>&) {
    int count = 0;
    const auto counted = [&](const auto& call) {
      try {
        call();
      } catch (const InvalidArgument&) {
        ++count;
      }
    };
    counted([&] { second.wait(); });
    counted([&] { pool.close(); });
    refused.set_value(count);
  });
  gate.open();
  EXPECT_EQ(refused.get_future().get(), 2);
  EXPECT_TRUE(group
                  .async([&](const Device&) {
                    try {
                      pool.submit([](Job&) {}).get();
                    } catch (const InvalidArgument&) {
                      return true;
                    }
                    return false;
                  })
                  .get());
}

TEST(PoolWorkers, AnIdleDeviceTellsTheTimeWhileTheFirstOneIsBusy) {
  Pool pool(host_group(2));
  Gate gate;
  const auto held = pool.submit([&](Job&) { gate.pass(); }, {.needs = {"host:0"}});
  while (pool.running() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(5));  // both workers sleep or run
  EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }, {.not_before_seconds = 0.02}).get(), "host:1");
  const auto never = pool.submit([](Job&) {}, {.not_before_seconds = 1e300});
  EXPECT_TRUE(never.cancel());
  gate.open();
}

TEST(PoolWorkers, WhatNoWorkerHasBegunIsCancelled) {
  DeviceGroup group = host_group(1);
  Pool pool(group);
  Gate gate;
  std::atomic<bool> inside = false;
  auto held = group.async([&](const Device&) {
    inside = true;
    gate.pass();
  });
  while (!inside) std::this_thread::yield();
  const auto assigned = pool.submit([](Job&) {});
  const auto waits = pool.submit([](Job&) { return 1; });
  EXPECT_TRUE(assigned.cancel());
  EXPECT_THROW(assigned.get(), Cancelled);
  const auto batch = pool.serve<int, int>([](Job&, std::span<int>, std::span<int>) {});
  const auto request = batch.submit(1);
  std::thread closes([&] { pool.close(true); });
  EXPECT_THROW((void)waits.get(), Cancelled);
  EXPECT_THROW((void)request.get(), Cancelled);
  gate.open();
  closes.join();
}

TEST(PoolWorkers, NothingStartsAfterCloseHasCancelled) {
  std::atomic<int> ran = 0;
  Pool pool(host_group(2));
  Gate gate;
  const auto held = pool.submit([&](Job&) { gate.pass(); }, {.needs = {"host:0"}});
  while (pool.running() == 0) std::this_thread::yield();
  const auto gang = pool.submit([&](Job&) { ++ran; }, {.gang = 2});  // reserves host:1
  std::vector<Future<void>> all;
  for (int k = 0; k < 5; ++k) all.push_back(pool.submit([&](Job&) { ++ran; }, {.kind = "unknown"}));
  std::this_thread::sleep_for(milliseconds(5));
  const int before = ran;
  std::thread closes([&] { pool.close(true); });
  EXPECT_THROW(gang.get(), Cancelled);
  gate.open();
  closes.join();
  EXPECT_EQ(ran, before);
}

TEST(PoolWorkers, TheChildOfAForkHasNoWorkers) {
  auto pool = std::make_unique<Pool>(host_group(1));
  const auto done = pool->submit([](Job&) { return 1; });
  EXPECT_EQ(done.get(), 1);
  const pid_t child = fork();
  if (child == 0) {
    int answer = 0;
    try {
      (void)pool->submit([](Job&) {});
    } catch (const Unavailable&) {
      answer = 7;
    }
    pool.reset();
    _exit(answer);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace paceline

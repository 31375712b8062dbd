// SPDX-License-Identifier: Apache-2.0
//
// Deadlines and starts of jobs while every worker is busy.
#include <paceline/engine/pool.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

/// Whether it holds within a time that is far longer than it takes.
template <class Condition>
bool soon(Condition condition) {
  for (int k = 0; k < 10'000 && !condition(); ++k) std::this_thread::sleep_for(milliseconds(1));
  return condition();
}

/// Has every device of the pool work until the gate is opened. running() also counts jobs that no worker has begun.
std::vector<Future<void>> keep_busy(Pool& pool, const Gate& gate, std::size_t devices) {
  std::vector<Future<void>> all;
  const auto begun = std::make_shared<std::atomic<std::size_t>>(0);
  for (std::size_t k = 0; k < devices; ++k) {
    const auto work = [&gate, begun](Job&) {
      ++*begun;
      gate.pass();
    };
    all.push_back(pool.submit(work, {.kind = "long"}));
    while (*begun <= k) std::this_thread::yield();
  }
  return all;
}

std::size_t clock_threads() {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name == "pl pool clock" ? 1 : 0;
  }
  return count;
}

TEST(PoolClock, AJobExpiresWhileEveryDeviceIsBusy) {
  Gate gate;
  Pool pool(host_group(2));
  const auto busy = keep_busy(pool, gate, 2);
  EXPECT_EQ(clock_threads(), 0) << "nothing has a deadline";
  const auto patient = pool.submit([](Job&) {}, {.deadline_seconds = 1e9});  // longer than clocks count
  const auto late = pool.submit([](Job&) {}, {.deadline_seconds = 0.01});    // before what the clock sleeps for
  const auto held = pool.submit([](Job&) {}, {.deadline_seconds = 0.01, .after = {busy[0]}});
  const auto gang = pool.submit([](Job&) {}, {.deadline_seconds = 0.01, .gang = 2});
  for (const auto* one : {&late, &held, &gang}) EXPECT_TRUE(soon([&] { return one->ready(); }));
  EXPECT_FALSE(busy[0].ready() || busy[1].ready());
  gate.open();
  for (const auto* one : {&late, &held, &gang}) EXPECT_THROW(one->get(), Expired);
  patient.get();
  for (const auto& one : busy) one.get();
  EXPECT_EQ(clock_threads(), 1);
  pool.close();
  EXPECT_TRUE(soon([] { return clock_threads() == 0; }));
}

TEST(PoolClock, WhatComesAfterALateJobIsCancelledAndMakesRoom) {
  Gate gate;
  Pool pool(host_group(1));
  const auto busy = keep_busy(pool, gate, 1);
  std::vector<Future<void>> all{pool.submit([](Job&) {}, {.deadline_seconds = 0.05})};
  while (pool.waiting() < 8) all.push_back(pool.submit([](Job&) {}, {.after = {all.front()}, .wait_for_room = false}));
  const auto next = pool.submit([](Job&) {});  // waits for room
  EXPECT_FALSE(busy[0].ready());
  EXPECT_THROW(all.front().get(), Expired);
  EXPECT_THROW(all.back().get(), Cancelled);
  gate.open();
  next.get();
}

// The other pool's devices are idle for it, so it has decided where the jobs run.
TEST(PoolClock, AJobExpiresOnAWorkerThatIsBusyForAnotherPool) {
  Gate gate;
  const DeviceGroup group = host_group(2);
  Pool other(group);
  const auto busy = keep_busy(other, gate, 2);
  Pool pool(group);
  const auto late = pool.submit([](Job&) {}, {.deadline_seconds = 0.01});
  const auto gang = pool.submit([](Job&) {}, {.deadline_seconds = 0.01, .gang = 2});
  const Batcher<int, int> batcher =
      pool.serve<int, int>([](Job&, std::span<int> in, std::span<int> out) { std::ranges::copy(in, out.begin()); });
  EXPECT_TRUE(soon([&] { return late.ready() && gang.ready(); }));
  const auto patient = batcher.submit(1);
  const auto hasty = batcher.submit(2, {.deadline_seconds = 0.01});
  EXPECT_TRUE(soon([&] { return hasty.ready(); }));
  EXPECT_FALSE(busy[0].ready() || busy[1].ready() || patient.ready());
  gate.open();
  EXPECT_THROW(late.get(), Expired);
  EXPECT_THROW(gang.get(), Expired);
  EXPECT_THROW((void)hasty.get(), Expired);
  EXPECT_EQ(patient.get(), 1);
}

TEST(PoolClock, CallsOfThenMaySubmitAndDoNotWait) {
  std::promise<Future<int>> told;
  std::promise<bool> refused;
  Gate gate;
  Pool pool(host_group(1));
  const auto busy = keep_busy(pool, gate, 1);
  const auto late = pool.submit([](Job&) {}, {.deadline_seconds = 0.01});
  late.then([&](const Future<void>&) {
    try {
      busy[0].get();
      refused.set_value(false);
    } catch (const InvalidArgument&) {
      refused.set_value(true);
    }
    told.set_value(pool.submit([](Job&) { return 7; }, {.deadline_seconds = 100.0}));
  });
  const auto again = told.get_future().get();
  EXPECT_TRUE(refused.get_future().get());
  EXPECT_FALSE(busy[0].ready() || again.ready());
  gate.open();
  EXPECT_EQ(again.get(), 7);
}

TEST(PoolClock, APoolMayEndInACallThatItsClockMakes) {
  Gate gate;
  std::promise<void> ended;
  auto pool = std::make_unique<Pool>(host_group(1));
  const auto busy = keep_busy(*pool, gate, 1);
  const auto late = pool->submit([](Job&) {}, {.deadline_seconds = 0.01});
  late.then([&](const Future<void>&) {
    pool.reset();
    ended.set_value();
  });
  ended.get_future().wait();
  EXPECT_FALSE(busy[0].ready());
  gate.open();
  busy[0].get();
  EXPECT_TRUE(soon([] { return clock_threads() == 0; }));
}

// A pool ends before the thread of its clock has begun. Where that is told too early, the destructor waits for the
// hour.
TEST(PoolClock, APoolThatEndsAtOnceDoesNotWaitForADeadline) {
  for (int k = 0; k < 200; ++k) {
    Pool pool(host_group(1));
    static_cast<void>(pool.submit([](Job&) {}, {.deadline_seconds = 3600.0}));
  }
}

TEST(PoolClock, DoesNotKeepItsNextTimeWhereThePoolIsOverBeforeACallReturns) {
  Gate gate;
  std::promise<void> ended;
  auto pool = std::make_unique<Pool>(host_group(1));
  const auto busy = keep_busy(*pool, gate, 1);
  const auto late = pool->submit([](Job&) {}, {.deadline_seconds = 0.01});
  late.then([&](const Future<void>&) {
    (void)pool->submit([](Job&) {}, {.deadline_seconds = 100.0});
    pool.reset();
    gate.open();
    while (!busy[0].ready()) std::this_thread::yield();
    ended.set_value();
  });
  ended.get_future().wait();
  EXPECT_TRUE(soon([] { return clock_threads() == 0; }));
}

// Jobs that are taken, expire and are cancelled as close to each other as can be: each ends once.
TEST(PoolClock, DeadlinesComeWhileJobsBeginAndAreCancelled) {
  std::atomic<int> ended = 0;
  constexpr int kJobs = 600;
  std::vector<Future<void>> all;
  {
    Pool pool(host_group(2));
    for (int k = 0; k < kJobs; ++k) {
      all.push_back(pool.submit([](Job&) { std::this_thread::sleep_for(std::chrono::microseconds(50)); },
                                {.deadline_seconds = 1e-6 * static_cast<double>(1 + 7 * k % 800),
                                 .not_before_seconds = k % 5 == 0 ? 1e-4 : 0.0}));
      all.back().then([&](const Future<void>&) { ++ended; });
      if (k % 7 == 0) (void)all[all.size() / 2].cancel();
    }
    pool.close();
  }
  EXPECT_EQ(ended, kJobs);
  for (const auto& one : all) EXPECT_TRUE(one.ready());
}

}  // namespace
}  // namespace paceline

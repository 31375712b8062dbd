// SPDX-License-Identifier: Apache-2.0
//
// Waits: what they let go of, how they spin, and how long they last.
#include <gtest/gtest.h>

#include <sched.h>
#include <sys/resource.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/device.hpp>

#include "runtime/short_wait.hpp"
#include "runtime/start_timeout.hpp"

namespace paceline::internal {
namespace {

struct Interrupt {};

int entered = 0;
int left = 0;
int polls = 0;
int polls_until_interrupt = 0;

void* enter() { return &++entered; }
void leave(void*) { ++left; }
void poll(void*) {
  if (++polls == polls_until_interrupt) throw Interrupt();
}

class Never final : public Event {
 public:
  [[nodiscard]] bool done() const override { return false; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "cuda:7"; }
};

class BlockingHooksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    entered = left = polls = polls_until_interrupt = 0;
    set_blocking_hooks({.enter = enter, .leave = leave, .poll = poll});
  }
  void TearDown() override { set_blocking_hooks({}); }
};

TEST_F(BlockingHooksTest, BracketAWaitAndAreAskedNowAndThen) {
  EXPECT_THROW(wait_for(Never(), std::chrono::seconds(1)), Timeout);
  EXPECT_EQ(entered, 1);
  EXPECT_EQ(left, 1);
  EXPECT_GE(polls, 1);
  EXPECT_LE(polls, 20) << "every 50 ms at most";
}

TEST_F(BlockingHooksTest, WhatAPollThrowsEndsTheWait) {
  polls_until_interrupt = 2;
  EXPECT_THROW(wait_for(Never(), std::chrono::hours(1)), Interrupt);
  EXPECT_EQ(entered, 1);
  EXPECT_EQ(left, 0) << "the hook that threw has taken its token back";
}

TEST_F(BlockingHooksTest, AreAskedForTheOuterWaitWhereTheInnerOneHasLetGoOfNothing) {
  polls_until_interrupt = 1;
  const BlockingRegion outer;
  set_blocking_hooks({.enter = []() -> void* { return nullptr; }, .leave = leave, .poll = poll});
  EXPECT_THROW(wait_for(Never(), std::chrono::seconds(30)), Interrupt);
  EXPECT_EQ(left, 0);
}

/// Done after so many queries.
class Looked final : public Event {
 public:
  explicit Looked(int looks) : left_(looks) {}
  [[nodiscard]] bool done() const override { return --left_ < 0; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "fake:0"; }

 private:
  mutable int left_;
};

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

long switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw + usage.ru_nivcsw;
}

TEST(WaitForAnEvent, KeepsItsCoreWhileTheEventIsDueAtOnce) {
  const int core = sched_getcpu();
  std::atomic<bool> over{false};
  std::jthread busy([&] {
    pin_to(core);
    while (!over) {
    }
  });
  long fewest = std::numeric_limits<long>::max();
  std::jthread waiting([&] {
    pin_to(core);
    // The system may take the core away in one round, but hardly in all.
    for (int round = 0; round < 10; ++round) {
      const long before = switches();
      wait_for(Looked(20));
      fewest = std::min(fewest, switches() - before);
    }
    over = true;
  });
  waiting.join();
  EXPECT_LE(fewest, 2) << "each switch gives the core to the busy program for a slice of its time";
}

/// Advances by a microsecond with each query.
struct FakeClock {
  using duration = std::chrono::microseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<FakeClock>;
  static constexpr bool is_steady = true;
  static time_point now() { return time_point(passed += duration(1)); }
  inline static duration passed{0};
};

using Wait = BasicShortWait<FakeClock>;

/// A wait that ends as soon as it sleeps.
void wait_shortly(Wait& wait) {
  EXPECT_TRUE(wait.until(true, [] { return false; }, [] { return true; }));
}

struct Counts {
  int looks = 0;
  int sleeps = 0;
  bool operator==(const Counts&) const = default;
};

/// Done at the given query, or once it sleeps.
Counts wait_until(Wait& wait, bool may_spin, int look, std::chrono::microseconds sleep = {}) {
  Counts counts;
  const auto done = [&] { return ++counts.looks == look; };
  EXPECT_TRUE(wait.until(may_spin, done, [&] {
    ++counts.sleeps;
    FakeClock::passed += sleep;
    return true;
  }));
  return counts;
}

TEST(ShortWait, SpinsOnlyAfterAShortWaitAndWhereItMay) {
  Wait wait;
  EXPECT_EQ(wait_until(wait, true, 1), (Counts{0, 1})) << "the first time";
  wait_shortly(wait);
  EXPECT_EQ(wait_until(wait, true, 3), (Counts{3, 0}));
  wait_shortly(wait);
  EXPECT_EQ(wait_until(wait, false, 1), (Counts{0, 1}));
}

TEST(ShortWait, SleepsOnceItHasSpunAsLongAsAWakeUpTakes) {
  Wait wait;
  wait_shortly(wait);
  const Counts counts = wait_until(wait, true, 0);
  EXPECT_GT(counts.looks, 10);
  EXPECT_LE(counts.looks, Wait::kSpin.count());
  EXPECT_EQ(counts.sleeps, 1);
}

TEST(ShortWait, DoesNotSpinAfterALongWaitUntilOneWasShortAgain) {
  Wait wait;
  wait_shortly(wait);
  wait_until(wait, true, 0, 2 * Wait::kShort);
  EXPECT_EQ(wait_until(wait, true, 1).looks, 0);
  EXPECT_EQ(wait_until(wait, true, 1).looks, 1);
}

TEST(ShortWait, SaysWhatTheSleepSaid) {
  Wait wait;
  EXPECT_FALSE(wait.until(true, [] { return false; }, [] { return false; }));
}

Device device_of(DeviceKind kind, const std::string& name) {
  Device device;
  device.kind = kind;
  device.name = device.memory_space = name;
  device.cores = {3};
  return device;
}

TEST(StartTimeout, AllowsForTheContextsOfGpus) {
  const std::vector<Device> host{device_of(DeviceKind::host, "host:0")};
  std::vector<Device> mixed = host;
  mixed.push_back(device_of(DeviceKind::cuda, "cuda:7"));
  EXPECT_EQ(internal::start_timeout(host), std::chrono::seconds(10));
  EXPECT_EQ(internal::start_timeout(mixed), std::chrono::seconds(120));
}

TEST(StartTimeout, SaysWhatTheWorkerWaitedFor) {
  const std::string host = internal::late_start(device_of(DeviceKind::host, "host:0"), std::chrono::seconds(10));
  EXPECT_EQ(host,
            "DeviceGroup: the worker of host:0 did not start within 10 s. Is another process holding its core 3 at a "
            "real-time priority?");
  const std::string gpu = internal::late_start(device_of(DeviceKind::cuda, "cuda:7"), std::chrono::seconds(120));
  EXPECT_NE(gpu.find("cuda:7 did not start within 120 s. It waits for the driver to make a context"), gpu.npos) << gpu;
}

}  // namespace
}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
//
// What a group waits for when it is closed, where others use its workers, too.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "host_group.hpp"
#include "tasks.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// The device that close() names in its Timeout, or "" without one.
std::string late(DeviceGroup& group, milliseconds timeout, const DeviceGroup::Between& between = {}) {
  try {
    group.close(timeout, between);
  } catch (const Timeout& error) {
    return error.device();
  }
  return "";
}

TEST(Close, CancelsWhatNobodyHasBegunInTime) {
  for (const bool impatient : {false, true}) {
    DeviceGroup other = host_group(1);
    DeviceGroup closing = host_group(2);
    Held held(other);
    std::atomic<int> ran{0};
    const DeviceId first[] = {0};
    const auto queued = task([&](DeviceId) { ++ran; });
    closing.open(queued, {.gang = true}, first);
    std::future<bool> waiting = std::async(std::launch::async, [&] { return closing.wait(*queued); });
    EXPECT_EQ(impatient ? late(closing, seconds(60), [] { return false; }) : late(closing, milliseconds(20)), "host:0");
    EXPECT_EQ(waiting.wait_for(seconds(5)), std::future_status::ready) << "who waits for it is told";
    held.go = true;
    EXPECT_TRUE(other.wait(*held.source));
    EXPECT_THROW(waiting.get(), Cancelled);
    EXPECT_TRUE(other.run(task([](DeviceId) {}))) << "what comes behind it has its turn";
    EXPECT_EQ(ran, 0);
  }
}

TEST(Close, DoesNotAskAgainOnceItWasToldToStop) {
  DeviceGroup whole = host_group(2);
  DeviceGroup shares[] = {whole.share(), whole.share()};
  std::atomic<int> inside{0};
  std::atomic<bool> go{false};
  for (const DeviceId device : whole.ids()) {
    const auto hold = task([&](DeviceId) {
      ++inside;
      while (!go) std::this_thread::yield();
      --inside;
    });
    shares[device.number()].open(hold, {.gang = true}, {&device, 1});
  }
  while (inside < 2) std::this_thread::yield();
  int asked = 0;
  EXPECT_NE(late(whole, seconds(60), [&] { return ++asked == 0; }), "");
  EXPECT_EQ(asked, 1);
  go = true;
  while (inside > 0) std::this_thread::yield();
  DeviceGroup::close_all();
}

TEST(Close, TellsOfWhatHasBegunAndWaitsForAnotherDevice) {
  DeviceGroup other = group_of({"host:1"});
  DeviceGroup closing = host_group(2);
  Held held(other);
  std::atomic<int> ran{0};
  const auto begun = task([&](DeviceId) { ++ran; });
  closing.submit(begun);
  while (ran == 0) std::this_thread::yield();
  EXPECT_EQ(late(closing, milliseconds(20)), "host:1");
  EXPECT_EQ(ran, 1);
  held.go = true;
  EXPECT_TRUE(closing.wait(*begun)) << "it comes to its end";
  EXPECT_EQ(ran, 2);
}

TEST(Close, WaitsForWorkThatHasMovedToAnotherWorker) {
  for (const bool opens_more : {false, true}) {
    DeviceGroup stuck = host_group(1);
    DeviceGroup closing = host_group(1);
    DeviceGroup third = host_group(1);
    Held held(stuck);
    std::atomic<bool> go{false};
    std::atomic<int> begun{0};
    std::atomic<int> ended{0};
    const auto hold = [&](DeviceId) {
      ++begun;
      while (!go) std::this_thread::yield();
      ++ended;
    };
    closing.submit(task(hold));
    EXPECT_EQ(late(stuck, milliseconds(20)), "host:0");
    while (begun == 0) std::this_thread::yield();
    if (opens_more) closing.submit(task(hold));
    std::jthread later([&] {
      std::this_thread::sleep_for(milliseconds(50));
      go = true;
    });
    EXPECT_EQ(late(closing, seconds(60)), "");
    EXPECT_EQ(ended, opens_more ? 2 : 1);
    EXPECT_TRUE(third.run(task([](DeviceId) {})));
    held.go = true;
    DeviceGroup::close_all();  // waits for the worker that was left behind
  }
}

TEST(Close, DoesNotWaitForACancelledGangThatHasMoved) {
  DeviceGroup stuck = host_group(1);
  DeviceGroup third = host_group(1);
  DeviceGroup closing = host_group(1);
  Held held(stuck);
  std::atomic<bool> go{false};
  std::atomic<bool> begun{false};
  const auto before = task([&](DeviceId) {
    begun = true;
    while (!go) std::this_thread::yield();
  });
  third.submit(before);
  const auto idle = std::make_shared<Idle>();
  closing.submit(idle);
  std::future<std::string> closed = std::async(std::launch::async, [&] { return late(closing, seconds(10)); });
  while (!closing.closed()) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(late(stuck, milliseconds(20)), "host:0");
  while (!begun) std::this_thread::yield();
  idle->cancel(nullptr);
  EXPECT_EQ(closed.wait_for(seconds(5)), std::future_status::ready) << "it waits for the work of a third group";
  go = true;
  EXPECT_TRUE(third.wait(*before));
  EXPECT_EQ(closed.get(), "");
  held.go = true;
  third.close();
  DeviceGroup::close_all();
}

TEST(Close, DoesNotFailForTheStuckWorkOfAGroupThatIsClosing) {
  DeviceGroup busy = host_group(1);
  DeviceGroup idle = host_group(1);
  Held held(busy);
  std::future<std::string> closed = std::async(std::launch::async, [&] { return late(busy, seconds(60)); });
  while (!busy.closed()) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(late(idle, milliseconds(20)), "");
  held.go = true;
  EXPECT_EQ(closed.get(), "");
}

TEST(Close, LeavesBehindTheWorkerThatHasTheWorkWhicheverItIs) {
  DeviceGroup stuck = host_group(1);
  DeviceGroup healthy = host_group(1);
  Held held(stuck);
  EXPECT_EQ(late(stuck, milliseconds(20)), "host:0");
  Held again(healthy);  // on the second worker
  EXPECT_EQ(late(healthy, milliseconds(20)), "host:0");
  DeviceGroup third = host_group(1);
  EXPECT_TRUE(third.run(task([](DeviceId) {})));
  held.go = true;
  again.go = true;
  third.close();
  DeviceGroup::close_all();
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// What a group waits for when it is closed, where others use its workers, too, and what takes the place of workers that
// are left.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

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

TEST(Close, OfAWorkersOwnGroupLeavesItsThreadToCloseAll) {
  std::atomic<bool> closed{false};
  std::atomic<bool> ended{false};
  {
    DeviceGroup group = host_group(1);
    group.submit(task([&](DeviceId) {
      EXPECT_EQ(late(group, milliseconds(0)), "") << "it does not wait for itself";
      DeviceGroup::close_all(std::chrono::nanoseconds::max());  // nor here
      closed = true;
      std::this_thread::sleep_for(milliseconds(50));
      ended = true;
    }));
    while (!closed) std::this_thread::yield();
  }
  DeviceGroup::close_all();
  EXPECT_TRUE(ended);
}

// Gives out numbers; the first one hangs until it is let go.
class Numbers final : public WorkSource {
 public:
  explicit Numbers(int count) : left_(count) {}
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    const std::lock_guard lock(mutex_);
    if (left_ == 0) return ended_ ? NextWork::done() : NextWork::wait();
    return NextWork::take(left_--);
  }
  void perform(DeviceId, std::int64_t number, Turn&) override {
    threads.insert(std::this_thread::get_id());
    if (hangs.exchange(false)) {
      inside = true;
      open.get_future().wait();
      inside = false;
    }
    (void)number;
  }
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override { ++finished; }
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override { ++finished; }
  void cancel(std::exception_ptr) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      left_ = 0;
      ended_ = true;
    }
    wake_all();
    wake_caller();
  }
  [[nodiscard]] bool complete() const noexcept override { return ended_; }

  std::atomic<bool> hangs{true};
  std::atomic<bool> inside{false};
  std::atomic<int> finished{0};
  std::promise<void> open;
  std::set<std::thread::id> threads;  // of one device, by one worker at a time

 private:
  std::mutex mutex_;
  int left_;
  std::atomic<bool> ended_{false};
};

void await(const auto& condition) {
  while (!condition()) std::this_thread::sleep_for(milliseconds(1));
}

TEST(ReplaceWorker, AnotherOneTakesUpWhatItHadBegun) {
  const auto numbers = std::make_shared<Numbers>(10);
  DeviceGroup group = host_group(1);
  DeviceGroup other = host_group(1);
  group.open(numbers, {});
  await([&] { return numbers->inside.load(); });
  auto waits = other.async([](const Device&) { return std::this_thread::get_id(); });  // comes to the same worker
  EXPECT_FALSE(group.replace_worker(group.ids()[0], *std::make_shared<Numbers>(1)));
  EXPECT_EQ(waits.wait_for(milliseconds(5)), std::future_status::timeout);
  ASSERT_TRUE(group.replace_worker(group.ids()[0], *numbers));
  await([&] { return numbers->finished == 9; });
  const std::thread::id second = waits.get();
  EXPECT_EQ(numbers->threads.size(), 2U);
  EXPECT_TRUE(numbers->threads.contains(second));
  numbers->open.set_value();
  await([&] { return numbers->finished == 10; });
  EXPECT_EQ(group.async([](const Device&) { return std::this_thread::get_id(); }).get(), second);
  EXPECT_FALSE(group.replace_worker(group.ids()[0], *numbers)) << "it is in no work of this source any more";
  group.close();
  EXPECT_EQ(other.async([](const Device&) { return std::this_thread::get_id(); }).get(), second);
}

TEST(ReplaceWorker, AGroupClosesAtOnceWhileTheOneThatWasLeftGoesOn) {
  const auto numbers = std::make_shared<Numbers>(3);
  DeviceGroup group = host_group(1);
  group.open(numbers, {});
  await([&] { return numbers->inside.load(); });
  ASSERT_TRUE(group.replace_worker(group.ids()[0], *numbers));
  await([&] { return numbers->finished == 2; });
  EXPECT_NO_THROW(group.close());
  EXPECT_TRUE(numbers->inside);
  EXPECT_FALSE(group.replace_worker(group.ids()[0], *numbers));
  numbers->open.set_value();
  await([&] { return numbers->finished == 3; });
}

}  // namespace
}  // namespace paceline

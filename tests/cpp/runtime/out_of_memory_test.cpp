// SPDX-License-Identifier: Apache-2.0
//
// Memory that runs out in the middle of a call.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include <paceline/runtime/device_group.hpp>

#include "host_group.hpp"
#include "shortage.hpp"
#include "tasks.hpp"

namespace paceline {
namespace {

/// Counts its calls, and holds the workers until `go`.
class Count final : public GroupTask {
 public:
  explicit Count(std::size_t devices, bool go_at_once = true) : seen(devices), go(go_at_once) {}
  void run(DeviceId device) noexcept override {
    seen[device.number()].fetch_add(1);
    while (!go) std::this_thread::yield();
  }
  [[nodiscard]] int total() const {
    int sum = 0;
    for (const auto& one : seen) sum += one;
    return sum;
  }
  std::vector<std::atomic<int>> seen;
  std::atomic<bool> go;
};

std::ptrdiff_t threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
}

/// The thread sanitizer starts a thread of its own with a program's first one.
std::ptrdiff_t threads_after_the_first() {
  std::thread([] {}).join();
  return threads();
}

/// Whether there are soon no more threads than that. The system shows a thread for a moment after it was joined. One
/// look has to do: while threads end, the list of them may lack one that another look still has.
bool no_more_than(std::ptrdiff_t count) {
  for (int look = 0; look < 10000; ++look) {
    if (threads() <= count) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(OutOfMemory, WhileASourceIsOpenedLeavesTheGroupAndTheSourceAsTheyWere) {
  for (const bool gang : {true, false}) {
    bool opened = false;
    int n = 0;
    while (!opened) {
      DeviceGroup group = host_group(3);  // a new one each time, because workers keep memory for their next source
      const auto task = std::make_shared<Count>(3);
      try {
        const Shortage shortage(++n, false);
        group.open(task, {.gang = gang});
        opened = true;
      } catch (const std::bad_alloc&) {
        ASSERT_FALSE(group.busy()) << "allocation " << n;
        ASSERT_TRUE(group.run(std::make_shared<Count>(3)));
        ASSERT_EQ(task->total(), 0) << "allocation " << n;
        group.open(task, {.gang = gang});
      }
      EXPECT_TRUE(group.wait(*task));
      EXPECT_EQ(task->total(), 3);
    }
    EXPECT_GT(n, 1) << "no allocation has failed";
  }
}

TEST(OutOfMemory, WhileAGroupIsMadeLeavesNoThreadBehind) {
  const std::vector<Device> devices = host_group(3).devices();
  const std::ptrdiff_t before = threads_after_the_first();
  std::optional<DeviceGroup> group;
  int failures = 0;
  while (!group) {
    try {
      const Shortage shortage(failures + 1, false);
      group.emplace(devices);
    } catch (const std::bad_alloc&) {
      ++failures;
      ASSERT_TRUE(no_more_than(before)) << "allocation " << failures;
    }
  }
  EXPECT_GT(failures, 3);
  EXPECT_TRUE(group->run(std::make_shared<Count>(3)));
}

TEST(OutOfMemory, WhileGroupsAreClosedEndsTheirWorkersAllTheSame) {
  const std::ptrdiff_t before = threads_after_the_first();
  for (int round = 0; round < 40; ++round) {
    DeviceGroup group = host_group(2);
    const DeviceGroup other = host_group(1);
    const auto idle = std::make_shared<Idle>();
    group.open(idle, {});
    const auto held = std::make_shared<Count>(2, round % 4 > 1);
    group.submit(held);
    while (held->total() < 2) std::this_thread::yield();
    {
      const Shortage shortage(1 + round / 4, round % 2 == 0);
      DeviceGroup::close_all(std::chrono::milliseconds(held->go ? 10000 : 1));
    }
    ASSERT_TRUE(group.closed() && other.closed()) << "round " << round;
    ASSERT_TRUE(idle->cancelled) << "round " << round;
    held->go = true;  // a worker that was left behind ends by itself
    ASSERT_TRUE(no_more_than(before)) << "round " << round;
  }
}

TEST(OutOfMemory, WhileAWorkerIsReplacedKeepsTheOrderOfTheGangsAndEveryThreadEnds) {
  const std::ptrdiff_t before = threads_after_the_first();
  {
    DeviceGroup stuck = host_group(1);
    DeviceGroup both = host_group(2);
    DeviceGroup third = host_group(2);
    Held held(stuck);
    std::vector<int> order;  // on host:0
    const auto gang = [&](int number) {
      const auto together = std::make_shared<std::barrier<>>(2);  // as a step, which has its devices together
      return task([&order, number, together](DeviceId device) {
        together->arrive_and_wait();
        if (device == 0) order.push_back(number);
      });
    };
    const auto older = gang(1);
    const auto newer = gang(2);
    both.submit(older);
    {
      const Shortage shortage;
      try {
        stuck.close(std::chrono::milliseconds(20));
        ADD_FAILURE() << "expected an error";
      } catch (...) {  // the Timeout, or that there is no memory for it
      }
    }
    third.submit(newer);
    const auto patience = [look = 0]() mutable { return ++look < 200; };
    EXPECT_TRUE(third.wait(*newer, patience)) << "two gangs wait for each other";
    EXPECT_TRUE(both.wait(*older, patience));
    EXPECT_EQ(order, (std::vector<int>{1, 2}));
    held.go = true;
    both.wait(*older);
    third.wait(*newer);
    DeviceGroup::close_all();
  }
  EXPECT_TRUE(no_more_than(before));
}

}  // namespace
}  // namespace paceline

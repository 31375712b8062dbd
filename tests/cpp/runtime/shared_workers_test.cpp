// SPDX-License-Identifier: Apache-2.0
//
// Groups that have devices in common.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cfenv>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "host_group.hpp"
#include "tasks.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

TEST(SharedWorkers, LetGoOfWhatIsOverBeforeTheyRunWhatElseHasItsPriority) {
  std::atomic<bool> begun[2]{};
  std::promise<void> open[2];
  DeviceGroup one = host_group(1);
  DeviceGroup other = host_group(1);
  const auto hold = [&](int k) {
    return other.async([&, k](const Device&) {
      begun[k] = true;
      open[k].get_future().wait();
    });
  };
  auto before = hold(0);
  while (!begun[0]) std::this_thread::yield();
  auto quick = one.async([](const Device&) {});
  auto after = hold(1);
  open[0].set_value();
  while (!begun[1]) std::this_thread::yield();
  EXPECT_NO_THROW(one.close(std::chrono::seconds(2)));
  open[1].set_value();
  quick.get();
  after.get();
}

TEST(SharedWorkers, AreOneThreadForEachDevice) {
  DeviceGroup one = host_group(2);
  std::array<std::thread::id, 2> threads;
  one.run(task([&](DeviceId device) { threads[device.number()] = std::this_thread::get_id(); }));
  {
    DeviceGroup other = group_of({"host:1", "host:0"});
    other.run(task([&](DeviceId device) { EXPECT_EQ(threads[1 - device.number()], std::this_thread::get_id()); }));
  }
  one.run(task([&](DeviceId device) { EXPECT_EQ(threads[device.number()], std::this_thread::get_id()); }));
}

TEST(SharedWorkers, LetGangsTakeTurnsInTheOrderInWhichTheyWereOpened) {
  DeviceGroup first = host_group(2);
  DeviceGroup second = group_of({"host:1"});
  DeviceGroup third = first.share();
  Held held(first);
  std::vector<int> order;  // on host:1
  std::vector<std::shared_ptr<Task>> waiting;
  for (int k = 0; k < 9; ++k) {
    DeviceGroup& group = k % 3 == 0 ? first : (k % 3 == 1 ? second : third);
    waiting.push_back(task([&, k, one = group.ids().back()](DeviceId device) {
      if (device == one) order.push_back(k);
    }));
    group.open(waiting.back(), {.priority = k % 2, .gang = true});
  }
  EXPECT_TRUE(first.busy() && second.busy() && third.busy());
  held.go = true;
  for (int k = 0; k < 9; ++k) second.wait(*waiting[static_cast<std::size_t>(k)]);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  first.wait(*held.source);
  EXPECT_FALSE(first.busy() || second.busy() || third.busy());
}

TEST(SharedWorkers, NeverWaitForEachOtherInACircle) {
  const std::vector<std::vector<std::string>> names{{"host:0", "host:1"},
                                                    {"host:1", "host:0"},
                                                    {"host:2", "host:0"},
                                                    {"host:1", "host:2"},
                                                    {"host:0", "host:1", "host:2"}};
  std::atomic<int> users[3]{};
  std::vector<std::jthread> callers;
  for (const auto& own : names) {
    callers.emplace_back([&] {
      DeviceGroup group = group_of(own);
      for (int round = 0; round < 100; ++round) {
        std::barrier together(static_cast<std::ptrdiff_t>(own.size()));  // as a step, which has its devices together
        const auto step = task([&](DeviceId device) {
          const auto d = static_cast<std::size_t>(own[device.number()].back() - '0');
          EXPECT_EQ(++users[d], 1) << "two gangs on one device";
          together.arrive_and_wait();
          --users[d];
        });
        EXPECT_TRUE(group.run(step));
      }
    });
  }
}

TEST(SharedWorkers, RefuseAGangInsideOfAPieceOfWork) {
  DeviceGroup one = host_group(2);
  DeviceGroup other = group_of({"host:1"});
  std::atomic<int> refused{0};
  one.run(task([&](DeviceId) {
    try {
      other.run(task([](DeviceId) {}));
    } catch (const InvalidArgument& error) {
      refused += std::string(error.what()).find("the loss_fn of another step") != std::string::npos ? 1 : 0;
    }
  }));
  EXPECT_EQ(refused, 2);
  EXPECT_TRUE(other.run(task([](DeviceId) {}))) << "outside it works";
}

TEST(SharedWorkers, AreReplacedWhenTheyWereLeftBehind) {
  DeviceGroup healthy = host_group(2);
  DeviceGroup waits = healthy.share();
  auto stuck = std::make_unique<DeviceGroup>(group_of({"host:0"}));
  Held held(*stuck);
  std::atomic<int> ran{0};
  const auto queued = task([&](DeviceId) { ++ran; });
  waits.submit(queued);
  EXPECT_THROW(stuck->close(milliseconds(20)), Timeout);
  EXPECT_TRUE(waits.wait(*queued)) << "what waited for its turn has moved to the new worker";
  EXPECT_TRUE(healthy.run(task([&](DeviceId) { ++ran; })));
  EXPECT_TRUE(group_of({"host:0"}).run(task([&](DeviceId) { ++ran; })));
  EXPECT_EQ(ran, 5);
  EXPECT_EQ(held.entered, 1) << "it is still inside";
  healthy.close();
  waits.close();
  held.go = true;
  stuck.reset();
  DeviceGroup::close_all();
}

TEST(SharedWorkers, AreLeftWithoutAWaitForTheWorkOfOthers) {
  DeviceGroup busy = host_group(1);
  DeviceGroup idle = host_group(1);
  Held held(busy);
  idle.close(std::chrono::hours(1));
  EXPECT_EQ(held.entered, 1);
  held.go = true;
  EXPECT_TRUE(busy.wait(*held.source));
  EXPECT_TRUE(busy.run(task([](DeviceId) {})));
}

TEST(SharedWorkers, RunWhatWasAcceptedBeforeAGroupIsClosed) {
  DeviceGroup busy = host_group(1);
  DeviceGroup closing = host_group(1);
  Held held(busy);
  std::atomic<int> ran{0};
  const auto queued = task([&](DeviceId) { ++ran; });
  closing.submit(queued);
  std::jthread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    held.go = true;
  });
  closing.close();
  EXPECT_EQ(ran, 1);
  busy.wait(*held.source);
}

TEST(SharedWorkers, OfAShareAreClosedWithTheWholeAndNotTheOtherWayRound) {
  DeviceGroup whole = host_group(2);
  DeviceGroup first = whole.share();
  DeviceGroup second = whole.share();
  Held held(first);
  EXPECT_TRUE(whole.busy());
  EXPECT_FALSE(second.busy());
  held.go = true;
  first.wait(*held.source);
  first.close();
  EXPECT_FALSE(whole.closed());
  EXPECT_TRUE(whole.run(task([](DeviceId) {})));
  whole.close();
  EXPECT_TRUE(second.closed());
  EXPECT_THROW(second.submit(task([](DeviceId) {})), Unavailable);
  EXPECT_THROW((void)whole.share(), Unavailable);
}

TEST(Async, RunsACallOnTheWorkerThatIsFreeAndGivesItsResultOrItsError) {
  DeviceGroup group = host_group(2);
  DeviceGroup first = group_of({"host:0"});
  Held held(first);
  EXPECT_EQ(group.async([](const Device& device) { return device.name; }).get(), "host:1");
  auto failing = group.async([](const Device&) { throw std::out_of_range("no such row"); });
  EXPECT_THROW(failing.get(), std::out_of_range);
  auto held_by_call = std::make_shared<int>(0);
  const std::weak_ptr<int> seen = held_by_call;
  group.async([held_by_call = std::move(held_by_call)](const Device&) {}).get();
  for (int look = 0; look < 5000 && !seen.expired(); ++look) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(seen.expired()) << "a worker that has not come to the call keeps what it holds";
  std::future<int> late = first.async([](const Device&) { return 7; });
  held.go = true;
  EXPECT_EQ(late.get(), 7);
}

TEST(Async, SaysThatItWasCancelledIfTheGroupIsClosedBefore) {
  DeviceGroup busy = host_group(1);
  DeviceGroup closing = host_group(1);
  Held held(busy);
  std::future<void> call = closing.async([](const Device&) {});
  closing.close();
  EXPECT_THROW(call.get(), Cancelled);
  held.go = true;
  busy.wait(*held.source);
}

TEST(SharedWorkers, StartEachClaimWithTheStateOfItsCallerAndItsDevice) {
  DeviceGroup one = host_group(1);
  DeviceGroup other = host_group(1);
  const auto cores = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);
    std::vector<int> found;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) found.push_back(core);
    }
    return found;
  };
  const std::vector<int> wide = cores();
  one.run(task([&](DeviceId) {
    std::fesetround(FE_DOWNWARD);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : wide) CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
  }));
  std::fesetround(FE_UPWARD);
  int rounding = -1;
  std::vector<int> pinned;
  const auto look = task([&](DeviceId) {
    rounding = std::fegetround();
    pinned = cores();
  });
  other.run(look);
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(rounding, FE_UPWARD);
  EXPECT_EQ(pinned, other.devices()[0].cores);
  other.run(task([&](DeviceId) { rounding = std::fegetround(); }));
  EXPECT_EQ(rounding, FE_TONEAREST);
}

}  // namespace
}  // namespace paceline

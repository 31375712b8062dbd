// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "errors.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

class CountTask final : public GroupTask {
 public:
  explicit CountTask(std::size_t count) : seen(count) {}
  void run(DeviceId device) noexcept override { seen[device.number()].fetch_add(1); }
  std::vector<std::atomic<int>> seen;
};

/// Holds the workers until release().
class HoldTask final : public GroupTask {
 public:
  void run(DeviceId) noexcept override {
    entered.fetch_add(1);
    while (!go.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::atomic<bool> go{false};
  std::atomic<int> entered{0};
};

TEST(DeviceGroup, RunsATaskOnceOnEachWorker) {
  DeviceGroup group = host_group(5);
  for (int round = 0; round < 500; ++round) {
    auto task = std::make_shared<CountTask>(group.size());
    EXPECT_TRUE(group.run(task));
    for (const auto& seen : task->seen) ASSERT_EQ(seen.load(), 1);
  }
}

TEST(DeviceGroup, RunsATaskToItsEndOnSomeDevicesOnly) {
  DeviceGroup group = host_group(3);
  const auto task = std::make_shared<CountTask>(group.size());
  const DeviceId two[] = {2, 0, 2};
  group.open(task, {.gang = true}, two);
  int looks = 0;
  EXPECT_TRUE(group.wait(*task, [&] { return ++looks < 100; })) << "it waits for a device that does not take part";
  EXPECT_FALSE(group.busy());
  EXPECT_EQ(task->seen[0].load(), 1);
  EXPECT_EQ(task->seen[1].load(), 0);
  EXPECT_EQ(task->seen[2].load(), 1);
}

TEST(DeviceGroup, RunsTasksThatFollowAtOnceAndThoseThatFollowAPause) {
  DeviceGroup group = host_group(2);  // each with a core of its own, if there are two
  for (int round = 0; round < 3000; ++round) {
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    auto task = std::make_shared<CountTask>(group.size());
    EXPECT_TRUE(group.run(task));
    for (const auto& seen : task->seen) ASSERT_EQ(seen.load(), 1);
  }
}

TEST(DeviceGroup, LetsTheWaiterLookUpAndLeave) {
  DeviceGroup group = host_group(2);
  auto task = std::make_shared<HoldTask>();
  int looks = 0;
  EXPECT_FALSE(group.run(task, [&] { return ++looks < 3; }));
  EXPECT_EQ(looks, 3);
  EXPECT_TRUE(group.busy());
  auto next = std::make_shared<CountTask>(2);
  EXPECT_FALSE(group.run(next, [] { return false; })) << "it waits its turn";
  EXPECT_EQ(next->seen[0], 0);
  task->go = true;
  EXPECT_TRUE(group.wait(*task));
  EXPECT_TRUE(group.wait(*next));
  EXPECT_FALSE(group.busy());
}

TEST(DeviceGroup, RefusesToWorkOnceClosed) {
  DeviceGroup group = host_group(2);
  const DeviceGroup other = group;
  group.close();
  group.close();
  EXPECT_TRUE(other.closed());
  EXPECT_THROW(group.submit(std::make_shared<CountTask>(2)), Unavailable);
}

TEST(DeviceGroup, StaysWholeWhenItIsMovedFrom) {
  DeviceGroup group = host_group(2);
  const DeviceGroup other = std::move(group);
  EXPECT_EQ(group.size(), 2U);  // a moved-from handle still belongs to the group
  EXPECT_EQ(other.size(), 2U);
}

TEST(DeviceGroup, WaitsForEverWhereThatIsTheTimeout) {
  auto task = std::make_shared<HoldTask>();
  DeviceGroup group = host_group(1);
  group.submit(task);
  while (task->entered.load() < 1) std::this_thread::yield();
  EXPECT_THROW(group.close(std::chrono::milliseconds(1)), Timeout);
  std::atomic<bool> gone{false};
  std::jthread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gone = true;
    task->go = true;
  });
  DeviceGroup::close_all(std::chrono::nanoseconds::max());  // waits for the worker that was left behind
  EXPECT_TRUE(gone);
}

TEST(DeviceGroup, LeavesAStuckWorkerBehindAndNamesIt) {
  auto task = std::make_shared<HoldTask>();
  {
    DeviceGroup group = host_group(2);
    group.submit(task);
    while (task->entered.load() < 2) std::this_thread::yield();
    const auto error = thrown_by<Timeout>([&] { group.close(std::chrono::milliseconds(20)); });
    EXPECT_EQ(error.device(), "host:0");
  }
  task->go = true;
}

TEST(DeviceGroup, StopsWaitingForAStuckWorkerWhenAskedTo) {
  auto task = std::make_shared<HoldTask>();
  {
    DeviceGroup group = host_group(2);
    group.submit(task);
    while (task->entered.load() < 2) std::this_thread::yield();
    int asked = 0;
    EXPECT_THROW(group.close(std::chrono::hours(1), [&] { return ++asked < 3; }), Timeout);
    EXPECT_EQ(asked, 3);
  }
  task->go = true;
}

TEST(DeviceGroup, RunsOrRefusesWhatIsSubmittedWhileItCloses) {
  for (int round = 0; round < 300; ++round) {
    DeviceGroup group = host_group(2);
    std::atomic<bool> submitting{false};
    std::thread other([&] {
      try {
        for (;;) {
          submitting = true;
          group.run(std::make_shared<CountTask>(2));
        }
      } catch (const Unavailable&) {
      }
    });
    while (!submitting) std::this_thread::yield();
    group.close();
    other.join();  // hangs if a worker never gets an accepted task
  }
}

TEST(DeviceGroup, CanBeDroppedByItsOwnWorker) {
  class DropTask final : public GroupTask {
   public:
    explicit DropTask(DeviceGroup group) : group_(std::make_unique<DeviceGroup>(std::move(group))) {}
    void run(DeviceId device) noexcept override {
      if (device == 0) group_.reset();
      done.fetch_add(1);
    }
    std::unique_ptr<DeviceGroup> group_;
    std::atomic<int> done{0};
  };
  std::shared_ptr<DropTask> task;
  {
    DeviceGroup group = host_group(2);
    task = std::make_shared<DropTask>(group);
    group.submit(task);
  }
  while (task->done.load() < 2) std::this_thread::yield();
}

TEST(DeviceGroup, NamesWhatIsWrongWithTheDevices) {
  EXPECT_THROW(DeviceGroup(std::vector<Device>{}), InvalidArgument);
  const std::vector<std::string> twice{"host:0", "host:0"};
  EXPECT_THROW(DeviceGroup{twice}, InvalidArgument);
  const std::vector<std::string> nonsense{"tpu:0"};
  EXPECT_THROW(DeviceGroup{nonsense}, InvalidArgument);
}

TEST(DeviceGroup, ClosesEveryOpenGroupOnDemand) {
  DeviceGroup group = host_group(1);
  DeviceGroup::close_all();
  EXPECT_TRUE(group.closed());
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not support threads in a forked child
TEST(DeviceGroup, IsOnlyDroppedInAForkedChild) {
  DeviceGroup group = host_group(2);
  EXPECT_TRUE(group.run(std::make_shared<CountTask>(2)));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int code = 1;
    try {
      group.submit(std::make_shared<CountTask>(2));
    } catch (const Unavailable&) {
      code = 0;
    }
    group.close();
    {
      const DeviceGroup gone = std::move(group);
    }
    _exit(code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(group.run(std::make_shared<CountTask>(2)));
}
#endif

}  // namespace
}  // namespace paceline

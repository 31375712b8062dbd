// SPDX-License-Identifier: Apache-2.0
//
// A pool whose workers are busy, closed underneath, shared, or in another process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "gate.hpp"
#include "host_group.hpp"
#include "pool_jobs.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

/// Keeps the workers of a group busy with something else than the pool.
class Held {
 public:
  explicit Held(DeviceGroup group) : group_(std::move(group)) {
    done_ = group_.async([this](const Device&) {
      inside_ = true;
      gate_.pass();
    });
    while (!inside_) std::this_thread::yield();
  }
  ~Held() { done_.wait(); }
  void release() { gate_.open(); }

 private:
  Gate gate_;
  std::atomic<bool> inside_{false};
  DeviceGroup group_;
  std::future<void> done_;
};

TEST(PoolWorkers, CallsOfThenMaySubmitAfterJobsThatEndedWithTheirOwn) {
  Gate gate;
  std::promise<Future<int>> told;
  Pool pool(host_group(1));
  const auto held = pool.submit([&](Job&) { gate.pass(); });
  const auto batch = pool.serve<int, int>([](Job&, std::span<int> in, std::span<int> out) {
    for (std::size_t k = 0; k < in.size(); ++k) out[k] = in[k];
  });
  const Future<int> a = batch.submit(1);
  const Future<int> b = batch.submit(2);
  a.then([&](const Future<int>&) { told.set_value(pool.submit([](Job&) { return 3; }, {.after = {b}})); });
  gate.open();
  EXPECT_EQ(told.get_future().get().get(), 3);
}

TEST(PoolWorkers, CloseWaitsForCallsOfThenAndForWhatJobsHold) {
  std::atomic<bool> telling = false;
  std::atomic<bool> told = false;
  std::atomic<bool> freed = false;
  Gate gate;
  Pool pool(host_group(1));
  std::shared_ptr<void> guard(nullptr, [&](void*) {
    std::this_thread::sleep_for(milliseconds(10));
    freed = true;
  });
  const auto job = pool.submit([&gate, held = std::move(guard)](Job&) { gate.pass(); });
  job.then([&](const Future<void>&) {
    telling = true;
    std::this_thread::sleep_for(milliseconds(300));
    told = true;
  });
  gate.open();
  while (!telling) std::this_thread::yield();
  pool.close();
  EXPECT_TRUE(told);
  EXPECT_TRUE(freed);
}

TEST(PoolWorkers, NobodyWaitsOnAWorkerNorInACallOfThen) {
  Gate gate;
  std::promise<int> refused;
  int cancelled = 0;
  DeviceGroup group = host_group(1);
  Pool pool(group);
  const auto first = pool.submit([&](Job&) { gate.pass(); });
  const auto second = pool.submit([](Job&) {});
  const auto third = pool.submit([](Job&) {});
  const auto count = [&] {
    int of = 0;
    for (const std::function<void()>& call :
         {std::function<void()>([&] { second.wait(); }), std::function<void()>([&] { pool.close(); })}) {
      try {
        call();
      } catch (const InvalidArgument&) {
        ++of;
      }
    }
    return of;
  };
  third.then([&](const Future<void>&) { cancelled = count(); });
  EXPECT_TRUE(third.cancel());  // on this thread
  EXPECT_EQ(cancelled, 2);
  first.then([&](const Future<void>&) { refused.set_value(count()); });
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

TEST(PoolWorkers, WhatNoWorkerHasBegunIsCancelled) {
  DeviceGroup group = host_group(1);
  Held held(group);
  Pool pool(group);
  const auto assigned = pool.submit([](Job&) {});
  EXPECT_EQ(pool.running(), 1);  // as the pool sees it
  const auto waits = pool.submit([](Job&) { return 1; });
  const auto after = pool.submit([](Job&) {}, {.after = {assigned}});
  EXPECT_TRUE(assigned.cancel());
  EXPECT_FALSE(assigned.cancel());
  EXPECT_THROW(assigned.get(), Cancelled);
  EXPECT_THROW(after.get(), Cancelled);
  EXPECT_EQ(pool.running(), 1);  // the next one
  std::thread closes([&] { pool.close(true); });
  EXPECT_THROW((void)waits.get(), Cancelled);
  held.release();
  closes.join();
}

TEST(PoolWorkers, OneRequestOfABatchThatNoWorkerHasBegunIsCancelledAlone) {
  std::vector<std::size_t> sizes;
  DeviceGroup group = host_group(1);
  Held held(group);
  Pool pool(group);
  const auto batch = pool.serve<int, int>(
      [&](Job&, std::span<int> in, std::span<int> out) {
        sizes.push_back(in.size());
        for (std::size_t k = 0; k < in.size(); ++k) out[k] = in[k];
      },
      {.max_batch = 4});
  const auto blocks = pool.submit([](Job&) {});
  std::vector<Future<int>> all;
  for (int k = 0; k < 4; ++k) all.push_back(batch.submit(k));
  EXPECT_TRUE(blocks.cancel());  // now the four are assigned as one batch
  EXPECT_EQ(pool.waiting(), 0);
  EXPECT_TRUE(all[1].cancel());
  held.release();
  EXPECT_THROW((void)all[1].get(), Cancelled);
  for (const int k : {0, 2, 3}) EXPECT_EQ(all[static_cast<std::size_t>(k)].get(), k);
  pool.close();
  EXPECT_EQ(sizes, (std::vector<std::size_t>{3}));
}

TEST(PoolWorkers, WhatNoWorkerHasBegunMovesFromARetiredDevice) {
  DeviceGroup both = host_group(2);
  Held held(DeviceGroup(std::vector<Device>{both.devices()[0]}));
  Pool pool(both);
  const auto one = pool.submit(where_it_ran);
  const auto other = pool.submit(where_it_ran);
  pool.retire("host:0");
  EXPECT_EQ(pool.submit(where_it_ran).get(), "host:1");  // after what came before
  EXPECT_TRUE(one.ready() && other.ready());
  held.release();
  EXPECT_EQ(one.get(), "host:1");
  EXPECT_EQ(other.get(), "host:1");
}

TEST(PoolWorkers, NothingStartsAfterCloseHasCancelled) {
  Gate gate;
  std::atomic<int> ran = 0;
  Pool pool(host_group(2));
  const auto held = pool.submit([&](Job&) { gate.pass(); }, {.needs = {"host:0"}});
  const auto gang = pool.submit([&](Job&) { ++ran; }, {.gang = 2});  // reserves host:1
  std::vector<Future<void>> all;
  for (int k = 0; k < 5; ++k) all.push_back(pool.submit([&](Job&) { ++ran; }, {.kind = "unknown"}));
  std::thread closes([&] { pool.close(true); });
  EXPECT_THROW(gang.get(), Cancelled);
  for (const auto& one : all) EXPECT_THROW(one.get(), Cancelled);
  gate.open();
  closes.join();
  EXPECT_EQ(ran, 0);
}

TEST(PoolWorkers, AFailedBatchRunsNoMoreOnceCloseHasCancelled) {
  Gate gate;
  std::atomic<int> runs = 0;
  Pool pool(host_group(1));
  const auto batch = pool.serve<int, int>([&](Job&, std::span<int>, std::span<int>) {
    ++runs;
    gate.pass();
    throw std::runtime_error("bad");
  });
  const auto blocks = pool.submit([&](Job&) {
    while (pool.waiting() < 4) std::this_thread::yield();
  });
  std::vector<Future<int>> all;
  for (int k = 0; k < 4; ++k) all.push_back(batch.submit(k));
  while (runs == 0) std::this_thread::yield();
  const auto waits = pool.submit([](Job&) {});
  std::thread closes([&] { pool.close(true); });
  EXPECT_THROW(waits.get(), Cancelled);
  gate.open();
  for (const auto& one : all) EXPECT_THROW((void)one.get(), Cancelled);
  closes.join();
  EXPECT_EQ(runs, 1);
}

TEST(PoolWorkers, AGroupThatIsClosedUnderneathCancelsWhatWaits) {
  Gate gate;
  std::atomic<bool> begun = false;
  DeviceGroup group = host_group(1);
  Pool pool(group);
  const auto runs = pool.submit([&](Job&) {
    begun = true;
    gate.pass();
    return 1;
  });
  while (!begun) std::this_thread::yield();
  const auto waits = pool.submit([](Job&) {});
  std::thread closes([&] { group.close(); });
  EXPECT_THROW(waits.get(), Cancelled);
  gate.open();
  closes.join();
  EXPECT_EQ(runs.get(), 1);
  EXPECT_THROW((void)pool.submit([](Job&) {}), Unavailable);
}

TEST(PoolWorkers, TwoPoolsOnOneGroupTakeTurns) {
  constexpr int kJobs = 1000;
  std::atomic<int> count = 0;
  std::atomic<int> before = -1;
  std::promise<void> last;
  std::function<void(Job&)> again;
  DeviceGroup group = host_group(1);
  Held held(group);
  Pool busy(group);
  Pool other(group);
  again = [&](Job&) {  // there is always a next one
    if (++count == kJobs) {
      last.set_value();
    } else {
      (void)busy.submit(again);
    }
  };
  (void)busy.submit(again);
  (void)busy.submit(again);
  const auto one = other.submit([&](Job&) { before = count.load(); });
  held.release();
  one.get();
  last.get_future().wait();
  EXPECT_LE(before, 1);
}

TEST(PoolWorkers, APoolEndsWhileAWorkerHasOtherWork) {
  const auto here = [](const Device&) { return std::this_thread::get_id(); };
  DeviceGroup group = host_group(1);
  const std::thread::id worker = group.async(here).get();
  auto pool = std::make_unique<Pool>(group);
  pool->submit([](Job&) {}).get();  // the worker has begun with the pool
  Held held(group);
  const auto cancelled = pool->submit([](Job&) {});
  pool->close(true);
  EXPECT_THROW(cancelled.get(), Cancelled);
  pool.reset();
  held.release();
  EXPECT_EQ(group.async(here).get(), worker) << "it was left behind";
}

TEST(PoolWorkers, APoolThatEndsInAStepWaitsForWhatRunsElsewhere) {
  DeviceGroup both = host_group(2);
  DeviceGroup first(std::vector<Device>{both.devices()[0]});
  EXPECT_TRUE(first
                  .async([&](const Device&) {
                    std::atomic<bool> begun = false;
                    std::atomic<bool> done = false;
                    {
                      Pool pool(DeviceGroup(std::vector<Device>{both.devices()[1]}));
                      (void)pool.submit([&](Job&) {
                        begun = true;
                        std::this_thread::sleep_for(milliseconds(20));
                        done = true;
                      });
                      while (!begun) std::this_thread::yield();
                    }
                    return done.load();
                  })
                  .get());
}

TEST(PoolWorkers, APoolMayEndInItsOwnJob) {
  Gate gate;
  std::promise<void> ended;
  std::shared_ptr<Pool> pool(new Pool(host_group(2)), [&](Pool* one) {
    delete one;
    ended.set_value();
  });
  Pool& same = *pool;
  const auto job = same.submit([&gate, keeps = std::move(pool)](Job&) { gate.pass(); });
  const auto waits = same.submit([&gate](Job&) { gate.pass(); }, {.gang = 2});
  gate.open();
  job.get();
  ended.get_future().wait();
  try {
    waits.get();
  } catch (const Cancelled&) {  // unless it began before
  }
}

/// What an interpreter does in waits, for the thread that turns it on.
thread_local bool interrupts = false;
std::atomic<int> regions = 0;

TEST(PoolWorkers, WaitsLetAnInterpreterGoOnAndCanBeInterrupted) {
  struct Interrupted {};
  const auto enter = []() -> void* {
    if (interrupts) ++regions;
    return interrupts ? &regions : nullptr;
  };
  set_blocking_hooks({.enter = enter, .leave = [](void*) {}, .poll = [](void*) { throw Interrupted(); }});
  Gate gate;
  Pool pool(host_group(1));
  const auto held = pool.submit([&](Job&) { gate.pass(); });
  std::vector<Future<void>> all;
  while (pool.waiting() < 8) all.push_back(pool.submit([](Job&) {}, {.wait_for_room = false}));
  interrupts = true;
  EXPECT_THROW(held.get(), Interrupted);
  EXPECT_THROW((void)pool.submit([](Job&) {}), Interrupted);
  EXPECT_THROW(pool.close(), Interrupted);
  interrupts = false;
  EXPECT_GE(regions, 3);
  gate.open();
  pool.close();
  for (const auto& one : all) one.get();
  set_blocking_hooks({});
}

TEST(PoolWorkers, TheChildOfAForkHasNoWorkers) {
  Gate gate;
  auto pool = std::make_unique<Pool>(host_group(1));
  EXPECT_EQ(pool->submit([](Job&) { return 1; }, {.deadline_seconds = 60.0}).get(), 1);
  std::vector<Future<void>> all{pool->submit([&](Job&) { gate.pass(); })};
  while (pool->waiting() < 8) all.push_back(pool->submit([](Job&) {}));
  std::thread waits_for_room([&] { pool->submit([](Job&) {}).get(); });
  std::this_thread::sleep_for(milliseconds(10));
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    int refused = 0;
    const auto refuses = [&](const auto& call) {
      try {
        call();
      } catch (const Unavailable&) {
        ++refused;
      }
    };
    refuses([&] { (void)pool->submit([](Job&) {}); });
    refuses([&] { all.back().get(); });
    refuses([&] { (void)all.back().cancel(); });
    refuses([&] { (void)pool->explain(); });
    refuses([&] { pool->retire("host:0"); });
    refuses([&] { pool->close(); });
    pool.reset();
    _exit(refused);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 6);
  gate.open();
  waits_for_room.join();
  for (const auto& one : all) one.get();
}

}  // namespace
}  // namespace paceline

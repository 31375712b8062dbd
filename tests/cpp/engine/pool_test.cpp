// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pool.hpp>

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

TEST(Pool, RunsAJobAndSaysWhere) {
  Pool pool(host_group(2));
  const Future<int> answer = pool.submit([](Job& job) { return job.device().kind == DeviceKind::host ? 42 : 0; });
  EXPECT_EQ(answer.get(), 42);
  EXPECT_TRUE(answer.ready());
  EXPECT_EQ(answer.report().device.substr(0, 5), "host:");
  EXPECT_GE(answer.report().seconds, 0.0);
  pool.submit([](Job&) {}).get();
}

TEST(Pool, AJobThatThrowsFailsAlone) {
  Pool pool(host_group(2));
  const Future<int> bad = pool.submit([](Job&) -> int { throw std::out_of_range("no such row"); });
  const Future<int> good = pool.submit([](Job&) { return 1; });
  EXPECT_THROW((void)bad.get(), std::out_of_range);
  EXPECT_EQ(good.get(), 1);
  const Future<void> slow = pool.submit([](Job&) {
    std::this_thread::sleep_for(milliseconds(5));
    throw std::out_of_range("no such row");
  });
  EXPECT_GE(slow.report().seconds, 0.005);
}

TEST(Pool, AllDevicesWorkAtOnce) {
  Pool pool(host_group(2));
  std::atomic<int> inside = 0;
  const auto meet = [&](Job&) {
    ++inside;
    while (inside < 2) std::this_thread::yield();
  };
  const auto one = pool.submit(meet);
  const auto other = pool.submit(meet);
  one.get();
  other.get();
  EXPECT_NE(one.report().device, other.report().device);
}

TEST(Pool, JobsStartByTheirKeys) {
  Gate gate;
  std::vector<int> order;
  Pool pool(host_group(1));
  const auto note = [&](int k) { return [&order, k](Job&) { order.push_back(k); }; };
  const auto first = pool.submit([&](Job&) { gate.pass(); });
  std::vector<Future<void>> all;
  all.push_back(pool.submit(note(3), {.priority = Priority::background}));
  all.push_back(pool.submit(note(2), {.priority = Priority::batch}));
  all.push_back(pool.submit(note(1)));
  all.push_back(pool.submit(note(0), {.priority = Priority::interactive}));
  gate.open();
  for (const auto& one : all) one.get();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
}

TEST(Pool, AJobMayBeCancelledUntilItRuns) {
  Gate gate;
  std::atomic<bool> runs = false;
  Pool pool(host_group(1));
  const auto first = pool.submit([&](Job&) {
    runs = true;
    gate.pass();
  });
  while (!runs) std::this_thread::yield();  // a run that no worker has begun could be cancelled
  const auto second = pool.submit([](Job&) {});
  const auto third = pool.submit([](Job&) {}, {.after = {second}});
  EXPECT_FALSE(first.cancel());
  EXPECT_TRUE(second.cancel());
  EXPECT_FALSE(second.cancel());
  EXPECT_THROW(second.get(), Cancelled);
  EXPECT_THROW(third.get(), Cancelled);
  gate.open();
  first.get();
  EXPECT_FALSE(first.cancel());
}

TEST(Pool, AJobComesAfterOthersAndNotAfterTheirFailure) {
  Pool pool(host_group(2));
  std::atomic<int> done = 0;
  const auto slow = pool.submit([&](Job&) {
    std::this_thread::sleep_for(milliseconds(20));
    ++done;
  });
  const auto quick = pool.submit([&](Job&) { ++done; });
  const auto after = pool.submit([&](Job&) { return done.load(); }, {.after = {slow, quick}});
  EXPECT_EQ(after.get(), 2);
  EXPECT_EQ(pool.submit([](Job&) { return 1; }, {.after = {slow}}).get(), 1);  // it has ended long ago
  const auto bad = pool.submit([](Job&) { throw std::runtime_error("bad"); });
  EXPECT_THROW(bad.get(), std::runtime_error);
  EXPECT_THROW(pool.submit([](Job&) {}, {.after = {bad}}).get(), Cancelled);
  Pool other(host_group(1));
  EXPECT_THROW((void)other.submit([](Job&) {}, {.after = {slow}}), InvalidArgument);
}

TEST(Pool, AGangHasItsDevicesToItself) {
  std::atomic<int> others = 0;
  Pool pool(host_group(2));
  std::vector<Future<void>> all;
  for (int k = 0; k < 20; ++k) {
    all.push_back(pool.submit([&](Job&) {
      ++others;
      std::this_thread::sleep_for(milliseconds(1));
      --others;
    }));
  }
  const auto both = pool.submit(
      [&](Job& job) {
        const int before = others;
        std::this_thread::sleep_for(milliseconds(5));
        return std::pair(job.devices().size(), std::max<int>(before, others));
      },
      {.gang = 2});
  EXPECT_EQ(both.get(), (std::pair<std::size_t, int>(2, 0)));
  for (const auto& one : all) one.get();
  EXPECT_THROW(pool.submit([](Job&) {}, {.gang = 3}).get(), Rejected);
}

TEST(Pool, DeadlinesAndNeedsAreKept) {
  Gate gate;
  Pool pool(host_group(1));
  for (int k = 0; k < 4; ++k) pool.submit([](Job&) { std::this_thread::sleep_for(milliseconds(30)); }).get();
  EXPECT_THROW(pool.submit([](Job&) {}, {.deadline_seconds = 0.001}).get(), Rejected);
  EXPECT_THROW(pool.submit([](Job&) {}, {.needs = {"cuda"}}).get(), Rejected);
  pool.submit([](Job&) {}, {.needs = {"host"}}).get();
  const auto first = pool.submit([&](Job&) { gate.pass(); }, {.kind = "long"});
  while (pool.running() == 0) std::this_thread::yield();
  const auto late = pool.submit([](Job&) {}, {.kind = "short", .deadline_seconds = 0.02});
  std::this_thread::sleep_for(milliseconds(60));
  gate.open();
  EXPECT_THROW(late.get(), Expired);
  first.get();
  const auto begin = std::chrono::steady_clock::now();
  pool.submit([](Job&) {}, {.not_before_seconds = 0.05}).get();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(49));
}

TEST(Pool, AFullQueueLetsWaitOrRejects) {
  Gate gate;
  std::atomic<bool> submitted = false;
  Pool pool(host_group(1));
  std::vector<Future<void>> all{pool.submit([&](Job&) { gate.pass(); })};
  while (pool.running() == 0) std::this_thread::yield();
  for (int k = 0; k < 8; ++k) all.push_back(pool.submit([](Job&) {}));
  EXPECT_THROW(pool.submit([](Job&) {}, {.wait_for_room = false}).get(), Rejected);
  std::thread waits([&] {
    pool.submit([](Job&) {}).get();
    submitted = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(submitted);
  gate.open();
  waits.join();
  EXPECT_TRUE(submitted);
  for (const auto& one : all) one.get();
}

TEST(Pool, AJobSubmitsAndDoesNotWait) {
  std::promise<int> told;
  Pool pool(host_group(1));
  const auto outer = pool.submit([&](Job&) { return pool.submit([](Job&) { return 7; }); });
  EXPECT_EQ(outer.get().get(), 7);
  EXPECT_THROW(pool.submit([&](Job&) { pool.submit([](Job&) {}).get(); }).get(), InvalidArgument);
  pool.submit([](Job&) { return 3; }).then([&](const Future<int>& one) { told.set_value(one.get()); });
  EXPECT_EQ(told.get_future().get(), 3);
}

TEST(Pool, RequestsAreAnsweredInBatchesAndABadOneFailsAlone) {
  std::mutex mutex;
  std::multiset<std::size_t> sizes;
  Gate gate;
  Pool pool(host_group(2));
  const auto first = pool.submit([&](Job&) { gate.pass(); });
  const auto second = pool.submit([&](Job&) { gate.pass(); });
  while (pool.running() < 2) std::this_thread::yield();
  const auto squares = pool.serve<int, int>(
      [&](Job&, std::span<int> in, std::span<int> out) {
        {
          const std::lock_guard lock(mutex);
          sizes.insert(in.size());
        }
        for (std::size_t k = 0; k < in.size(); ++k) {
          if (in[k] == 13) throw std::invalid_argument("13");
          out[k] = in[k] * in[k];
        }
      },
      {.max_batch = 8});
  std::vector<Future<int>> all;
  for (int k = 0; k < 40; ++k) all.push_back(squares.submit(k));
  gate.open();
  for (int k = 0; k < 40; ++k) {
    if (k == 13) {
      EXPECT_THROW((void)all[13].get(), std::invalid_argument);
    } else {
      EXPECT_EQ(all[static_cast<std::size_t>(k)].get(), k * k);
    }
  }
  EXPECT_GT(*sizes.rbegin(), 1U);
  EXPECT_LE(*sizes.rbegin(), 8U);
  EXPECT_THROW((pool.serve<int, int>([](Job&, std::span<int>, std::span<int>) {})), InvalidArgument);
}

TEST(Pool, RetiredDevicesStartNothing) {
  Pool pool(host_group(2));
  pool.retire("host:0");
  for (int k = 0; k < 10; ++k) EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }).get(), "host:1");
  EXPECT_NE(pool.explain().find("host:0: 0 jobs in 0 runs, 0.000 s; retired"), std::string::npos) << pool.explain();
  pool.restore("host:0");
  pool.retire("host:1");
  EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }).get(), "host:0");
  EXPECT_THROW(pool.retire("host:7"), InvalidArgument);
  EXPECT_EQ(pool.active(), std::vector<std::string>{"host:0"});
  EXPECT_FALSE(pool.retire_unless_last("host:0"));
  EXPECT_TRUE(pool.retire_unless_last("host:1"));
  pool.restore("host:1");
  EXPECT_TRUE(pool.retire_unless_last("host:0"));
  EXPECT_EQ(pool.active(), std::vector<std::string>{"host:1"});
}

TEST(Pool, CloseFinishesOrCancelsWhatWaits) {
  Gate gate;
  std::atomic<bool> begun = false;
  std::atomic<int> ran = 0;
  const auto job = [&](Job&) {
    std::this_thread::sleep_for(milliseconds(2));
    ++ran;
  };
  Pool finishes(host_group(1));
  for (int k = 0; k < 5; ++k) (void)finishes.submit(job);
  finishes.close();
  EXPECT_EQ(ran, 5);
  EXPECT_THROW((void)finishes.submit(job), Unavailable);
  Pool cancels(host_group(1));
  const auto runs = cancels.submit([&](Job&) {
    begun = true;
    gate.pass();
  });
  while (!begun) std::this_thread::yield();
  std::vector<Future<void>> all;
  for (int k = 0; k < 5; ++k) all.push_back(cancels.submit(job));
  std::thread closes([&] { cancels.close(true); });
  for (const auto& one : all) EXPECT_THROW(one.get(), Cancelled);
  gate.open();
  closes.join();
  runs.get();
  EXPECT_EQ(ran, 5);
}

TEST(Pool, AServedKindTakesRequestsOnly) {
  std::promise<void> called;
  Pool pool(host_group(1));
  const auto same = pool.serve<int, int>([](Job&, std::span<int> in, std::span<int> out) { out[0] = in[0]; });
  EXPECT_THROW((void)pool.submit([](Job&) {}, {.kind = "request"}), InvalidArgument);
  EXPECT_EQ(same.submit(3).get(), 3);
  pool.submit([](Job&) { throw std::runtime_error("bad"); }).then([&](const Future<void>& one) {
    called.set_value();
    one.get();  // throws, and nobody hears of it
  });
  called.get_future().wait();
}

TEST(Pool, ABatcherWhosePoolIsGoneRefuses) {
  auto pool = std::make_unique<Pool>(host_group(1));
  const auto batch = pool->serve<int, int>([](Job&, std::span<int> in, std::span<int> out) { out[0] = in[0]; });
  EXPECT_EQ(batch.submit(1).get(), 1);
  pool.reset();
  EXPECT_THROW((void)batch.submit(1), Unavailable);
}

TEST(Pool, WritesALedgerThatBeginsBeforeItsFirstJob) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("paceline_pool_ledger_" + std::to_string(getpid()));
  {
    Pool pool(host_group(2));
    pool.write_ledger(path);
    pool.submit([](Job&) {}).get();
    EXPECT_THROW(pool.write_ledger(path), InvalidArgument);
  }
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  EXPECT_EQ(text.find(R"({"paceline_pool_ledger": 1, "options": {)"), 0) << text;
  for (const char* event : {"add_device", "add_kind", "submit", "measure", "finish"})
    EXPECT_NE(text.find(event), std::string::npos) << text;
  Pool used(host_group(1));
  EXPECT_THROW(used.write_ledger(path / "below"), InvalidArgument);
  used.submit([](Job&) {}).get();
  EXPECT_THROW(used.write_ledger(path), InvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THROW(Pool(host_group(1)).write_ledger("/dev/full"), InvalidArgument);
}

TEST(Pool, AnIdleDeviceTellsTheTimeWhileTheFirstOneIsBusy) {
  Gate gate;
  Pool pool(host_group(2));
  const auto held = pool.submit([&](Job&) { gate.pass(); }, {.needs = {"host:0"}});
  while (pool.running() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(5));
  EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }, {.not_before_seconds = 0.02}).get(), "host:1");
  EXPECT_TRUE(pool.submit([](Job&) {}, {.not_before_seconds = 1e300}).cancel());
  gate.open();
}

TEST(Pool, EachFutureEndsOnceWhateverHappens) {
  constexpr int kThreads = 3;
  constexpr int kJobs = 2000;
  std::atomic<int> ended = 0;
  std::atomic<int> ran = 0;
  std::atomic<int> completed = 0;
  {
    Pool pool(host_group(2));
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(static_cast<unsigned>(t));
        std::vector<Future<int>> mine;
        for (int k = 0; k < kJobs; ++k) {
          JobOptions options{.priority = static_cast<Priority>(random() % 4), .wait_for_room = random() % 4 > 0};
          if (random() % 8 == 0) options.deadline_seconds = 0.01 * static_cast<double>(1 + random() % 10);
          if (random() % 8 == 0) options.gang = 2;
          if (random() % 4 == 0 && !mine.empty()) options.after = {mine[random() % mine.size()]};
          const bool fails = random() % 16 == 0;
          mine.push_back(pool.submit(
              [&ran, fails](Job&) {
                ++ran;
                return fails ? throw std::runtime_error("bad") : 1;
              },
              options));
          mine.back().then([&](const Future<int>& one) {
            ++ended;
            try {
              completed += one.get();
            } catch (const std::runtime_error&) {
            }
          });
          if (random() % 8 == 0) mine[random() % mine.size()].cancel();
          if (t == 0 && random() % 50 == 0) {
            const std::string device = "host:" + std::to_string(random() % 2);
            pool.retire(device);
            pool.restore(device);
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  EXPECT_EQ(ended, kThreads * kJobs);
  EXPECT_GT(completed, kJobs);
  EXPECT_LE(completed, ran);
}

}  // namespace
}  // namespace paceline

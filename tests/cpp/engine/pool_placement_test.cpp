// SPDX-License-Identifier: Apache-2.0
//
// A placement of the user's own.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"
#include "pool_jobs.hpp"

namespace paceline {
namespace {

using plan::PoolCandidate;
using plan::PoolQuestion;
using Answer = std::optional<std::size_t>;

plan::PoolOptions by(std::function<Answer(const PoolQuestion&)> choose) {
  return {.placement = plan::Placement::custom, .choose = std::move(choose)};
}

Answer last_idle(const PoolQuestion& question) {
  Answer last;
  for (const PoolCandidate& one : question.candidates) {
    if (one.idle && (!last || one.device > *last)) last = one.device;
  }
  return last;
}

TEST(PoolPlacement, JobsStartWhereTheUsersFunctionSays) {
  std::mutex mutex;
  std::vector<std::string> asked;
  Gate gate;
  Pool pool(host_group(3), by([&](const PoolQuestion& question) {
              const std::lock_guard lock(mutex);
              asked.push_back(
                  std::string(question.kind_name) + " " + std::to_string(static_cast<int>(question.priority)) + " " +
                  (question.deadline_seconds < 1e9 ? "due" : "any") + " " + std::string(question.candidates[0].name));
              return last_idle(question);
            }));
  std::atomic<bool> held{false};
  const auto hold = pool.submit([&](Job& job) {
    held = true;
    gate.pass();
    return job.device().name;
  });
  while (!held) std::this_thread::yield();
  EXPECT_EQ(pool.submit(where_it_ran, {.kind = "a", .priority = Priority::batch, .deadline_seconds = 100.0}).get(),
            "host:1");
  gate.open();
  EXPECT_EQ(hold.get(), "host:2");
  EXPECT_EQ(pool.submit(where_it_ran).get(), "host:2");
  const std::lock_guard lock(mutex);
  EXPECT_TRUE(std::ranges::any_of(asked, [](const std::string& one) { return one.starts_with("a 2 due host:"); }));
}

// Under the pool's mutex each of these calls would wait for ever.
TEST(PoolPlacement, TheFunctionMayUseThePoolButNotWaitForIt) {
  std::atomic<int> more{3};
  std::atomic<int> ran{0};
  std::atomic<int> refused{0};
  std::atomic<Pool*> known{nullptr};
  Pool pool(host_group(2), by([&](const PoolQuestion& question) -> Answer {
              Pool& itself = *known;
              EXPECT_GE(itself.waiting(), 1);
              EXPECT_FALSE(itself.explain().empty());
              if (more.fetch_sub(1) > 0) {
                const auto other = itself.submit([&](Job&) { ++ran; });
                try {
                  other.get();
                } catch (const InvalidArgument&) {
                  ++refused;
                }
                EXPECT_THROW(itself.close(), InvalidArgument);
              }
              return last_idle(question);
            }));
  known = &pool;
  pool.submit([&](Job&) { ++ran; }).get();
  while (ran < 4) std::this_thread::yield();  // a closed pool takes no more
  pool.close();
  EXPECT_EQ(ran, 4);
  EXPECT_EQ(refused, 3);
}

TEST(PoolPlacement, AFunctionThatThrowsLosesNoJob) {
  Pool pool(host_group(2), by([](const PoolQuestion&) -> Answer { throw std::runtime_error("no idea"); }));
  for (int k = 0; k < 5; ++k) (void)pool.submit(where_it_ran).get();
  const std::string text = pool.explain();
  EXPECT_NE(text.find("The placement failed 5 times, the last time by: no idea."), std::string::npos) << text;
}

TEST(PoolPlacement, AFunctionThatWaitsIsAskedAgain) {
  std::atomic<int> asked{0};
  Pool pool(host_group(2),
            by([&](const PoolQuestion& question) { return ++asked < 4 ? Answer() : last_idle(question); }));
  EXPECT_EQ(pool.submit(where_it_ran).get(), "host:1");
  EXPECT_GE(asked, 4);
}

TEST(PoolPlacement, AFunctionThatAlwaysWaitsKeepsNoPoolOpen) {
  for (const bool timed : {false, true}) {
    Pool pool(host_group(2), by([](const PoolQuestion&) { return Answer(); }));
    const auto job = pool.submit(where_it_ran, {.deadline_seconds = timed ? 1000.0 : plan::PoolJob{}.deadline_seconds});
    pool.close();
    EXPECT_FALSE(job.get().empty());
  }
}

TEST(PoolPlacement, APoolThatClosesWhileTheFunctionRunsCancelsWhatWaits) {
  Gate gate;
  std::atomic<bool> asked{false};
  std::optional<Pool> pool(std::in_place, host_group(1), by([&](const PoolQuestion& question) {
                             asked = true;
                             gate.pass();
                             return last_idle(question);
                           }));
  std::optional<Future<std::string>> job;
  std::thread submits([&] { job = pool->submit(where_it_ran); });
  while (!asked) std::this_thread::yield();
  pool->close(true);
  gate.open();
  submits.join();
  EXPECT_THROW(job->get(), Cancelled);
}

TEST(PoolPlacement, ManyThreadsAskOneAtATimeAndEachJobRunsOnce) {
  std::atomic<int> inside{0};
  std::atomic<int> together{0};
  std::atomic<int> ran{0};
  std::atomic<int> asked{0};
  Pool pool(host_group(3), by([&](const PoolQuestion& question) {
              if (++inside > 1) ++together;
              const Answer answer = ++asked % 3 == 0 ? Answer() : last_idle(question);
              --inside;
              return answer;
            }));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int k = 0; k < 150; ++k) {
        const auto job = pool.submit([&](Job&) { ++ran; }, {.kind = std::to_string((t + k) % 3)});
        if (k % 10 == 0) job.get();
      }
    });
  }
  for (std::thread& one : threads) one.join();
  pool.close();
  EXPECT_EQ(ran, 600);
  EXPECT_EQ(together, 0);
}

// A thread that has submitted asks no more than 64 times for others. Then a worker goes on.
TEST(PoolPlacement, AWorkerGoesOnWhereThereAreMoreQuestionsThanAThreadAsks) {
  constexpr int kKinds = 200;
  std::mutex mutex;
  std::vector<std::string> kinds;
  Gate gate;
  std::atomic<bool> open{false};
  std::atomic<bool> begun{false};
  std::atomic<int> by_first{0};
  std::thread::id first_id;
  Pool pool(host_group(1), by([&](const PoolQuestion& question) {
              if (!begun) first_id = std::this_thread::get_id();
              begun = true;
              by_first += std::this_thread::get_id() == first_id ? 1 : 0;
              if (!open) {
                gate.pass();
                return Answer();
              }
              const std::lock_guard lock(mutex);
              if (std::ranges::find(kinds, question.kind_name) == kinds.end()) kinds.emplace_back(question.kind_name);
              return kinds.size() < kKinds ? Answer() : last_idle(question);
            }));
  std::thread first([&] { (void)pool.submit([](Job&) {}, {.kind = "0"}); });
  while (!begun) std::this_thread::yield();
  std::vector<Future<std::string>> jobs;
  for (int k = 1; k < kKinds; ++k) jobs.push_back(pool.submit(where_it_ran, {.kind = std::to_string(k)}));
  open = true;
  gate.open();
  first.join();
  EXPECT_LE(by_first, 64);
  for (const auto& job : jobs) EXPECT_EQ(job.get(), "host:0");
}

// The pool may have asked just before the run ended, so a few late questions are no fault.
TEST(PoolPlacement, ADeviceThatARunHasLeftIsIdleInTheNextQuestion) {
  constexpr int kRounds = 10;
  std::atomic<bool> ended{false};
  std::atomic<int> busy{0};
  Pool pool(host_group(2), by([&](const PoolQuestion& question) {
              const bool idle = last_idle(question) == Answer(1);
              if (ended && !idle) ++busy;
              return idle ? Answer(1) : Answer();
            }));
  for (int k = 0; k < kRounds; ++k) {
    ended = false;
    Gate gate;
    std::atomic<bool> held{false};
    const auto hold = pool.submit([&](Job&) {
      held = true;
      gate.pass();
    });
    hold.then([&](const auto&) { ended = true; });
    while (!held) std::this_thread::yield();
    const auto waits = pool.submit(where_it_ran);
    gate.open();
    EXPECT_EQ(waits.get(), "host:1");
    hold.get();
  }
  EXPECT_LT(busy, kRounds / 2);
}

TEST(PoolPlacement, ACallOfThenMayWaitForAJobThatIsPlacedMeanwhile) {
  std::atomic<bool> ran{false};
  std::atomic<bool> in_time{false};
  Gate gate;
  Pool pool(host_group(2), by([](const PoolQuestion& question) -> Answer {
              return question.kind_name == "first" ? Answer(0) : last_idle(question);
            }));
  const auto first = pool.submit([&](Job&) { gate.pass(); }, {.kind = "first"});
  first.then([&](const auto&) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!ran && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    in_time = ran.load();
  });
  const auto second = pool.submit([&](Job&) { ran = true; }, {.kind = "second", .after = {first}});
  gate.open();
  second.get();
  pool.close();
  EXPECT_TRUE(in_time);
}

TEST(PoolPlacement, TheDestructorWaitsForTheFunction) {
  Gate gate;
  std::atomic<bool> asked{false};
  std::atomic<bool> over{false};
  std::atomic<bool> destroyed{false};
  std::atomic<bool> lets_wait{true};
  std::optional<Pool> pool(std::in_place, host_group(1), by([&](const PoolQuestion&) {
                             if (lets_wait.exchange(false)) return Answer();  // on the thread that submits
                             asked = true;
                             gate.pass();
                             over = true;
                             return Answer();
                           }));
  const auto job = pool->submit(where_it_ran, {.deadline_seconds = 1000.0});
  while (!asked) std::this_thread::yield();
  std::thread ends([&] {
    pool.reset();
    destroyed = true;
  });
  EXPECT_THROW(job.get(), Cancelled);
  std::this_thread::sleep_for(std::chrono::milliseconds(400));  // more than the destructor waits for workers
  EXPECT_FALSE(destroyed);
  gate.open();
  ends.join();
  EXPECT_TRUE(over);
}

// The pool may have asked just before the close, so a few late questions are no fault.
TEST(PoolPlacement, AJobThatACloseHasCancelledIsNotAskedAbout) {
  constexpr int kRounds = 10;
  std::atomic<bool> ended{false};
  std::atomic<int> late{0};
  for (int k = 0; k < kRounds; ++k) {
    ended = false;
    Pool pool(host_group(2), by([&](const PoolQuestion&) {
                late += ended ? 1 : 0;
                return Answer();
              }));
    const auto job = pool.submit(where_it_ran);
    job.then([&](const auto&) { ended = true; });
    pool.close(true);
    EXPECT_THROW(job.get(), Cancelled);
  }
  EXPECT_LT(late, kRounds / 2);
}

TEST(PoolPlacement, ADeviceThatCameBackIsNotToldAsReleased) {
  Pool pool(host_group(2));
  EXPECT_TRUE(pool.retire_unless_last("host:1", true));
  EXPECT_NE(pool.explain().find("; released"), std::string::npos);
  pool.restore("host:1");
  pool.close();
  EXPECT_EQ(pool.explain().find("; released"), std::string::npos);
}

}  // namespace
}  // namespace paceline

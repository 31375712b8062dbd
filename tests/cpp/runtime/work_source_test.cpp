// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/work_source.hpp>

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "host_group.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

/// A separate list of calls per device, run in order. `ended` is set when all are done.
class Jobs final : public WorkSource {
 public:
  using Job = std::function<void(Turn&)>;
  explicit Jobs(std::vector<std::vector<Job>> jobs) : jobs_(std::move(jobs)), next_(jobs_.size()) {
    for (const auto& list : jobs_) left_ += static_cast<int>(list.size());
  }

  NextWork next(DeviceId device, Clock::time_point) noexcept override {
    if (cancelled_ || next_[device.number()] == jobs_[device.number()].size()) return NextWork::done();
    return NextWork::take(static_cast<std::int64_t>(next_[device.number()]++));
  }
  void perform(DeviceId device, std::int64_t work, Turn& turn) override {
    jobs_[device.number()][static_cast<std::size_t>(work)](turn);
  }
  void done(DeviceId, std::int64_t, const WorkTiming& timing) noexcept override {
    EXPECT_LE(timing.start, timing.finish);
    end_one();
  }
  void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept override {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& thrown) {
      failures.push_back(std::to_string(device.number()) + "/" + std::to_string(work) + ": " + thrown.what());
    }
    end_one();
  }
  void cancel(std::exception_ptr) noexcept override {
    cancelled_ = true;
    wake_all();
    wake_caller();
  }
  [[nodiscard]] bool complete() const noexcept override { return left_ == 0 || cancelled_; }

  std::vector<std::string> failures;  // on one device only, in these tests

 private:
  void end_one() noexcept {
    --left_;
    wake_caller();
  }

  std::vector<std::vector<Job>> jobs_;
  std::vector<std::size_t> next_;  // each worker writes only its own entry
  std::atomic<int> left_{0};
  std::atomic<bool> cancelled_{false};
};

/// Waits until an event is done, then answers done.
class Waiting final : public WorkSource {
 public:
  explicit Waiting(NextWork wait) : wait_(wait) {}

  NextWork next(DeviceId, Clock::time_point now) noexcept override {
    ++asked;
    const bool due = now >= wait_.until || (wait_.event != nullptr && wait_.event->done()) || called_;
    if (!due) return wait_;
    over_ = true;
    wake_caller();
    return NextWork::done();
  }
  void perform(DeviceId, std::int64_t, Turn&) override {}
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override {}
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override {}
  void cancel(std::exception_ptr) noexcept override { call(); }
  [[nodiscard]] bool complete() const noexcept override { return over_; }
  void call() {
    called_ = true;
    wake(0);
  }
  std::atomic<int> asked{0};

 private:
  NextWork wait_;
  std::atomic<bool> called_{false};
  std::atomic<bool> over_{false};
};

class Flag final : public Event {
 public:
  [[nodiscard]] bool done() const override { return set; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "fake:0"; }
  std::atomic<bool> set{false};
};

TEST(WorkSource, IsAskedAgainAtItsDeadlineAfterItsEventAndWhenItCalls) {
  DeviceGroup group = host_group(1);
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(20);
  const auto timed = std::make_shared<Waiting>(NextWork::wait(nullptr, deadline));
  group.run(timed);
  EXPECT_GE(std::chrono::steady_clock::now(), deadline);
  EXPECT_LE(timed->asked, 4) << "nobody asks all the time";

  Flag flag;
  const auto waiting = std::make_shared<Waiting>(NextWork::wait(&flag));
  group.submit(waiting);
  std::this_thread::sleep_for(milliseconds(5));
  EXPECT_FALSE(waiting->complete());
  flag.set = true;
  EXPECT_TRUE(group.wait(*waiting));

  const auto called = std::make_shared<Waiting>(NextWork::wait());
  group.submit(called);
  std::this_thread::sleep_for(milliseconds(5));
  EXPECT_FALSE(called->complete());
  called->call();
  EXPECT_TRUE(group.wait(*called));
}

TEST(WorkSource, LearnsOfAFailureAndGoesOn) {
  DeviceGroup group = host_group(1);
  int ran = 0;
  const auto jobs = std::make_shared<Jobs>(
      std::vector<std::vector<Jobs::Job>>{{[](Turn&) { throw std::runtime_error("no"); }, [&](Turn&) { ++ran; }}});
  EXPECT_TRUE(group.run(jobs));
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(jobs->failures, std::vector<std::string>{"0/0: no"});
}

TEST(WorkSource, FillsTheGapsOfThoseAboveIt) {
  DeviceGroup group = host_group(1);
  std::vector<std::string> order;
  std::atomic<bool> begun{false};
  Flag flag;
  const auto note = [&](const char* what) { return [&order, what](Turn&) { order.emplace_back(what); }; };
  const auto background = std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>{{[&](Turn&) {
                                                                                        begun = true;
                                                                                        while (!flag.set)
                                                                                          std::this_thread::yield();
                                                                                        order.emplace_back("low");
                                                                                      },
                                                                                      note("low"), note("low")}});
  group.open(background, {.priority = -1});
  while (!begun) std::this_thread::yield();
  const auto middle = std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>{{note("middle"), note("middle")}});
  group.open(middle, {.priority = -7});  // a lower priority than the first, so it waits for the first
  const auto step = std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>{{note("step"), note("step")}});
  group.submit(step);
  flag.set = true;
  EXPECT_TRUE(group.wait(*step));
  EXPECT_TRUE(group.wait(*background));
  EXPECT_TRUE(group.wait(*middle));
  EXPECT_EQ(order, (std::vector<std::string>{"low", "step", "step", "low", "low", "middle", "middle"}));
}

TEST(WorkSource, TakesTurnsWithOthersOfItsPriority) {
  DeviceGroup group = host_group(1);
  std::vector<std::string> order;
  std::atomic<bool> begun{false};
  Flag flag;
  const auto note = [&](const char* what) { return [&order, what](Turn&) { order.emplace_back(what); }; };
  const auto hold = [&](Turn&) {
    begun = true;
    while (!flag.set) std::this_thread::yield();
  };
  const auto made = [](std::vector<Jobs::Job> jobs) {
    return std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>{std::move(jobs)});
  };
  const auto first = made({hold, note("a"), note("a"), note("a")});
  group.open(first, {.priority = -1});
  while (!begun) std::this_thread::yield();
  const auto second = made({note("b"), note("b")});
  const auto third = made({note("c"), note("c"), note("c")});
  const auto step = made({note("step"), note("step")});
  group.open(second, {.priority = -1});
  group.open(third, {.priority = -1});
  group.submit(step);
  flag.set = true;
  for (const auto& one : {first, second, third, step}) EXPECT_TRUE(group.wait(*one));
  // The others arrived during the first piece, after which there was nobody to give the turn to.
  EXPECT_EQ(order, (std::vector<std::string>{"step", "step", "a", "b", "c", "a", "b", "c", "a", "c"}));
}

TEST(WorkSource, OfAHigherPriorityRunsBetweenThePiecesOfAGang) {
  DeviceGroup group = host_group(1);
  std::vector<std::string> order;
  const auto urgent = std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>{
      {[&](Turn&) { order.emplace_back("urgent"); }, [&](Turn&) { order.emplace_back("urgent"); }}});
  const auto step = std::make_shared<Jobs>(
      std::vector<std::vector<Jobs::Job>>{{[&](Turn&) {
                                             order.emplace_back("step");
                                             group.open(urgent, {.priority = 1});  // which waits for nobody
                                           },
                                           [&](Turn&) { order.emplace_back("step"); }}});
  group.submit(step);
  EXPECT_TRUE(group.wait(*step));
  EXPECT_TRUE(group.wait(*urgent));
  EXPECT_EQ(order, (std::vector<std::string>{"step", "urgent", "urgent", "step"}));
}

TEST(WorkSource, IsOpenOnSomeDevicesOnly) {
  DeviceGroup group = host_group(3);
  std::atomic<int> ran{0};
  const Jobs::Job job = [&](Turn& turn) {
    EXPECT_EQ(turn.device().name, "host:1");
    ++ran;
  };
  const auto jobs = std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>{{}, {job, job}, {}});
  const DeviceId second[] = {1};
  group.open(jobs, {}, second);
  EXPECT_FALSE(group.busy()) << "a step may begin";
  EXPECT_TRUE(group.wait(*jobs));
  EXPECT_EQ(ran, 2);
  EXPECT_THROW(group.open(jobs, {}), InvalidArgument) << "it was opened before";
  const DeviceId fourth[] = {3};
  EXPECT_THROW(group.open(std::make_shared<Jobs>(std::vector<std::vector<Jobs::Job>>(3)), {}, fourth), InvalidArgument);
}

TEST(WorkSource, IsCancelledWhenTheGroupCloses) {
  DeviceGroup group = host_group(2);
  const auto waiting = std::make_shared<Waiting>(NextWork::wait());
  group.open(waiting, {});
  group.close();
  EXPECT_TRUE(waiting->complete());
}

/// The cores that this thread may run on.
std::vector<int> cores_of_this_thread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

TEST(TurnLoan, TakesOneThreadFromDeviceToDevice) {
  // Two micro-batches, each on a thread with a stack of its own, pass through two stages on a device each.
  DeviceGroup group = host_group(2);
  constexpr int kRounds = 50;
  struct Traveller {
    TurnLoan loan;
    std::vector<std::string> seen{};
  };
  Traveller travellers[2];
  std::atomic<int> users[2]{};
  std::vector<std::jthread> threads;
  for (Traveller& traveller : travellers) {
    threads.emplace_back([&] {
      while (const Turn* turn = traveller.loan.borrow()) {
        const std::size_t d = turn->device().name == "host:0" ? 0 : 1;
        EXPECT_EQ(++users[d], 1) << "two threads use one device";
        EXPECT_EQ(cores_of_this_thread(), turn->device().cores);
        traveller.seen.push_back(turn->device().name);
        --users[d];
        traveller.loan.give_back();
      }
    });
  }
  std::atomic<int> through_first[2]{};
  std::vector<std::vector<Jobs::Job>> jobs(2);
  for (int round = 0; round < kRounds; ++round) {
    for (int t = 0; t < 2; ++t) {
      jobs[0].push_back([&, t](Turn& turn) {
        EXPECT_EQ(++users[0], 1);
        --users[0];
        EXPECT_TRUE(turn.lend(travellers[t].loan));
        ++through_first[t];
      });
      jobs[1].push_back([&, t, round](Turn& turn) {
        while (through_first[t] <= round) std::this_thread::yield();
        EXPECT_TRUE(turn.lend(travellers[t].loan));
      });
    }
  }
  const auto stages = std::make_shared<Jobs>(std::move(jobs));
  EXPECT_TRUE(group.run(stages));
  EXPECT_TRUE(stages->failures.empty());
  for (Traveller& traveller : travellers) {
    traveller.loan.close();
    EXPECT_FALSE(Turn(group.devices()[0]).lend(traveller.loan)) << "nobody borrows any more";
  }
  threads.clear();
  for (const Traveller& traveller : travellers) {
    EXPECT_EQ(std::count(traveller.seen.begin(), traveller.seen.end(), "host:0"), kRounds);
    EXPECT_EQ(std::count(traveller.seen.begin(), traveller.seen.end(), "host:1"), kRounds);
  }
}

}  // namespace
}  // namespace paceline

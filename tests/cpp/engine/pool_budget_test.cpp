// SPDX-License-Identifier: Apache-2.0
//
// Jobs between the micro-batches of a step that always has work.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/work_source.hpp>

#include "errors.hpp"
#include "gate.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

/// A step of so many micro-batches on one device, with a call in each.
class BusyStep final : public WorkSource {
 public:
  BusyStep(std::int64_t count, std::function<void(std::int64_t)> call) : count_(count), call_(std::move(call)) {}
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    return done_ < count_ ? NextWork::take(done_) : NextWork::done();
  }
  void perform(DeviceId, std::int64_t work, Turn&) override { call_(work); }
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override {
    ++done_;
    wake_caller();
  }
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override { done_ = count_; }
  void cancel(std::exception_ptr) noexcept override {}
  [[nodiscard]] bool complete() const noexcept override { return done_ >= count_; }
  [[nodiscard]] std::int64_t ran() const { return done_; }

 private:
  std::int64_t count_;
  std::function<void(std::int64_t)> call_;
  std::atomic<std::int64_t> done_{0};
};

/// After how many micro-batches of a step each job ran that was submitted in its first one.
std::vector<std::int64_t> ran_after(double budget, const std::vector<JobOptions>& jobs, double seconds) {
  std::vector<std::int64_t> after(jobs.size());
  DeviceGroup group = host_group(1);
  Pool pool(group, {}, budget);
  std::shared_ptr<BusyStep> step;
  step = std::make_shared<BusyStep>(100, [&](std::int64_t work) {
    for (std::size_t k = 0; work == 0 && k < jobs.size(); ++k) {
      pool.submit(
          [&, k](Job&) {
            after[k] = step->ran();
            std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
          },
          jobs[k]);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  group.run(step);
  pool.close();
  return after;
}

const JobOptions kInteractive{.priority = Priority::interactive};

TEST(PoolBudget, AnInteractiveJobWaitsForOneMicroBatchAndOthersForTheStep) {
  const auto after =
      ran_after(0.1, {{.kind = "batch"}, {.kind = "deadline", .deadline_seconds = 0.9}, kInteractive}, 0.0);
  EXPECT_EQ(after[0], 100) << "it has a patience of a second";
  EXPECT_LT(after[1], 10);
  EXPECT_LT(after[2], 10);
}

TEST(PoolBudget, WithoutABudgetTheStepComesFirst) { EXPECT_EQ(ran_after(0.0, {kInteractive}, 0.0)[0], 100); }

TEST(PoolBudget, JobsTakeNoMoreThanTheirPartFromAStep) {
  // The first job spends what the budget gives in six seconds.
  const auto after = ran_after(0.01, {kInteractive, kInteractive, kInteractive}, 0.06);
  EXPECT_LT(after[0], 10);
  EXPECT_EQ(after[1], 100);
  EXPECT_EQ(after[2], 100);
}

TEST(PoolBudget, ADeviceThatJoinedLendsItsTimeToo) {
  DeviceGroup group(std::vector<Device>{find_device("host:1")});
  Pool pool(host_group(1));
  pool.add(find_device("host:1"));
  std::atomic<std::int64_t> after{-1};
  std::shared_ptr<BusyStep> step;
  step = std::make_shared<BusyStep>(100, [&](std::int64_t work) {
    if (work == 0) {
      pool.submit([&](Job&) { after = step->ran(); }, {.priority = Priority::interactive, .needs = {"host:1"}});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  group.run(step);
  pool.close();
  EXPECT_LT(after, 10);
  EXPECT_TRUE(says(pool.explain(), "of them beside steps"));
}

/// A step whose share of the host has ended, and that waits for others.
class WaitingStep final : public WorkSource {
 public:
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    asked_ = true;
    return ended_ ? NextWork::done() : NextWork::wait();
  }
  void perform(DeviceId, std::int64_t, Turn&) override {}
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override {}
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override {}
  void cancel(std::exception_ptr) noexcept override { end(); }
  [[nodiscard]] bool complete() const noexcept override { return ended_; }
  [[nodiscard]] bool asked() const noexcept { return asked_; }
  void end() noexcept {
    ended_ = true;
    wake_all();
    wake_caller();
  }

 private:
  std::atomic<bool> asked_{false};
  std::atomic<bool> ended_{false};
};

TEST(PoolBudget, IsNotChargedWhileAStepWaits) {
  DeviceGroup group = host_group(1);
  Pool pool(group, {}, 0.1);
  const auto step = std::make_shared<WaitingStep>();
  group.submit(step);
  while (!step->asked()) std::this_thread::yield();
  for (int k = 0; k < 3; ++k) {
    pool.submit([](Job&) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }, kInteractive).get();
  }
  EXPECT_FALSE(says(pool.explain(), "of them beside steps")) << pool.explain();
  step->end();
  group.wait(*step);
}

TEST(PoolBudget, IsAPartOfADevicesTime) {
  for (const double budget : {-0.1, 1.5}) {
    EXPECT_TRUE(says(message_of([&] { Pool pool(host_group(1), {}, budget); }), "budget is"));
  }
}

TEST(PoolBudget, AStepGoesOnAfterAJobThatHangsBetweenItsMicroBatches) {
  Gate gate;
  std::atomic<int> back = 0;
  std::int64_t ran = 0;
  DeviceGroup group = host_group(1);
  Pool pool(group, {}, 1.0);
  std::shared_ptr<BusyStep> step = std::make_shared<BusyStep>(100, [&](std::int64_t work) {
    const auto hangs = [&](Job&) {
      gate.pass();
      ++back;
    };
    if (work == 0) (void)pool.submit(hangs, kInteractive);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::thread watch([&] {
    for (bool found = false; !found;) {
      std::vector<plan::RunId> over;
      pool.visit_runs_over(0.01, [&](plan::RunId run, auto&&...) { over.push_back(run); });
      for (const plan::RunId run : over) found |= pool.give_up(run, std::make_exception_ptr(Timeout("it hangs")));
    }
    for (int k = 0; k < 5000 && step->ran() < 100; ++k) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ran = step->ran();
    gate.open();
  });
  group.run(step);
  watch.join();
  EXPECT_EQ(ran, 100);
  while (back == 0) std::this_thread::yield();
}

}  // namespace
}  // namespace paceline

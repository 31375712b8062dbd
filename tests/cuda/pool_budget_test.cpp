// SPDX-License-Identifier: Apache-2.0
//
// Pools on GPUs beside steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/work_source.hpp>

#include "errors.hpp"
#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "pool_launches.hpp"

namespace paceline {
namespace {

/// A step that has no work to give until it ends, as one whose micro-batches are all enqueued. Or, `busy`, always some,
/// in so many pieces at most.
class WaitingStep final : public WorkSource {
 public:
  explicit WaitingStep(int busy = 0) : busy_(busy) {}
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    asked_ = true;
    if (ended_) return NextWork::done();
    return busy_ > 0 ? NextWork::take(0) : NextWork::wait();
  }
  void perform(DeviceId, std::int64_t, Turn&) override { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override {
    if (--busy_ == 0) end();
  }
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override {}
  void cancel(std::exception_ptr) noexcept override { end(); }
  [[nodiscard]] bool complete() const noexcept override { return ended_; }
  [[nodiscard]] bool asked() const noexcept { return asked_; }
  [[nodiscard]] bool ended() const noexcept { return ended_; }
  void end() noexcept {
    ended_ = true;
    wake_all();
    wake_caller();
  }

 private:
  std::atomic<int> busy_;
  std::atomic<bool> asked_{false};
  std::atomic<bool> ended_{false};
};

/// A step of the group that its worker has asked for work.
std::shared_ptr<WaitingStep> begun(DeviceGroup& group, int busy = 0) {
  const auto step = std::make_shared<WaitingStep>(busy);
  group.submit(step);
  while (!step->asked()) std::this_thread::yield();
  return step;
}

TEST(CudaPoolBudget, BesideAStepJobsStartWithinTheBudget) {
  for (const double budget : {0.1, 0.0}) {
    set_up(0, 1);
    {
      DeviceGroup group = group_of({"cuda:0"});
      Pool pool(group, {}, budget);
      const auto step = begun(group);
      // The first one spends what the budget gives in ten seconds.
      const Future<void> first = pool.submit([&](Job& here) { launch(0, here.stream(), 1.0); });
      const Future<void> second = pool.submit([&](Job& here) { launch(0, here.stream(), 1.0); });
      if (budget > 0.0) first.get();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_EQ(first.ready(), budget > 0.0);
      EXPECT_FALSE(second.ready());
      step->end();
      group.wait(*step);
      first.get();
      second.get();
      EXPECT_EQ(ran, 2);
    }
    expect_clean();
  }
}

TEST(CudaPoolBudget, BesideAStepThatAlwaysHasWorkJobsEndAndTheNextOnesStart) {
  set_up(0, 1);
  {
    DeviceGroup group = group_of({"cuda:0"});
    Pool pool(group, {}, 1.0);
    const auto step = begun(group, 20000);
    for (int k = 0; k < 3; ++k) {
      pool.submit([&](Job& here) { launch(0, here.stream()); }, {.priority = Priority::interactive}).get();
    }
    EXPECT_FALSE(step->ended()) << "nobody asked whether the GPU had done the job";
    step->end();
    group.wait(*step);
    EXPECT_EQ(ran, 3);
  }
  expect_clean();
}

bool soon_ready(const Future<void>& job) {
  for (int k = 0; k < 5000 && !job.ready(); ++k) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return job.ready();
}

TEST(CudaPoolBudget, AJobThatTheBudgetKeepsFromAGpuExpiresOrStartsElsewhere) {
  set_up(0, 1);
  {
    DeviceGroup group = group_of({"cuda:0"});
    Pool pool(group_of({"cuda:0", "host:0"}), {}, 0.0);
    const auto step = begun(group);
    const Future<void> late = pool.submit([](Job&) {}, {.deadline_seconds = 0.05, .needs = {"cuda"}});
    EXPECT_TRUE(soon_ready(late));
    EXPECT_TRUE(says(pool.explain(), "waits for the budget")) << pool.explain();
    pool.retire("host:0");
    const Future<void> moved = pool.submit([](Job&) {});
    const Future<void> stays = pool.submit([&](Job& here) { launch(0, here.stream()); }, {.needs = {"cuda"}});
    pool.restore("host:0");
    EXPECT_TRUE(soon_ready(moved));
    EXPECT_FALSE(stays.ready());
    step->end();
    group.wait(*step);
    stays.get();
    EXPECT_THROW(late.get(), Expired);
    EXPECT_EQ(moved.report().device, "host:0");
  }
  expect_clean();
}

TEST(CudaPoolBudget, AsManyRequestsWaitWhileTheBudgetKeepsThemFromTheGpu) {
  set_up(0, 1);
  {
    DeviceGroup group = group_of({"cuda:0"});
    Pool pool(group, {}, 0.0);
    const auto step = begun(group);
    auto batcher = pool.serve<int, int>(
        [](Job&, std::span<int> requests, std::span<int> answers) { std::ranges::copy(requests, answers.begin()); },
        {.max_batch = 16});
    std::vector<Future<int>> answers;
    for (int k = 0; k < 100; ++k) answers.push_back(batcher.submit(k, {.wait_for_room = false}));
    step->end();
    group.wait(*step);
    for (int k = 0; k < 100; ++k) EXPECT_EQ(answers[k].get(), k);
  }
  expect_clean();
}

TEST(CudaPoolBudget, JobsExpireWhileTheBudgetKeepsTheGpuFromAnotherOne) {
  set_up(0, 1);
  {
    DeviceGroup group = group_of({"cuda:0"});
    Pool pool(group, {}, 0.0);
    const auto step = begun(group);
    const Future<void> first = pool.submit([&](Job& here) { launch(0, here.stream()); });
    const Future<void> second = pool.submit([&](Job& here) { launch(0, here.stream()); }, {.deadline_seconds = 0.05});
    EXPECT_TRUE(soon_ready(second));
    EXPECT_FALSE(first.ready());
    step->end();
    group.wait(*step);
    first.get();
    EXPECT_THROW(second.get(), Expired);
  }
  expect_clean();
}

}  // namespace
}  // namespace paceline

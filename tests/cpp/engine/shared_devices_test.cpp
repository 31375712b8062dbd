// SPDX-License-Identifier: Apache-2.0
//
// Steps that share devices.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/pipeline_step.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/schedule.hpp>

#include "counting_program.hpp"
#include "host_group.hpp"
#include "pipeline_programs.hpp"

namespace paceline {
namespace {

using Trainer = BasicDataParallel<double>;

TEST(SharedDevices, AreUsedByTurnsAndNoStepMayBeginInsideOfAnother) {
  const DeviceGroup both = host_group(2);
  const DeviceGroup second(std::vector<Device>{both.devices()[1]});
  std::vector<std::jthread> callers;
  for (const DeviceGroup* const group : {&both, &second, &both}) {
    callers.emplace_back([group] {
      Trainer trainer(*group, {.parameter_count = 1});
      Trainer inner(*group, {.parameter_count = 1});
      for (int step = 0; step < 100; ++step) {
        const Objective loss = trainer.step(16, [&](const MicroBatch& mb, Trainer::Replica& replica) {
          replica.gradients[0] += static_cast<double>(mb.size());
          if (step % 20 == 7 && mb.device == 0) {
            EXPECT_THROW(inner.step(4, [](const MicroBatch&, auto&) { return 0.0; }), InvalidArgument);
          }
          return static_cast<double>(mb.size());
        });
        ASSERT_EQ(loss.value(), 1.0);
        ASSERT_EQ(trainer.gradients()[0], 1.0);
      }
      const auto body = [](const MicroBatch& mb, auto&) { return static_cast<double>(mb.size()); };
      EXPECT_EQ(inner.step(4, body).value(), 1.0) << "outside it works";
    });
  }
}

/// Has both devices until it lets go.
class Holding final : public StepProgram {
 public:
  bool run(const MicroBatch&) override {
    ++entered;
    go.wait(false);
    return false;
  }
  std::atomic<int> entered{0};
  std::atomic<bool> go{false};
};

TEST(SharedDevices, AreNotWaitedForByAStepThatIsCancelledBeforeItsTurn) {
  const DeviceGroup group = host_group(2);
  const auto holding = std::make_shared<Holding>();
  Step before(group, holding, {.shares = {1, 1}, .stealing = false});
  before.start();
  while (holding->entered < 2) std::this_thread::yield();
  const auto program = std::make_shared<CountingProgram>(4, 1, false);
  Step step(group, program, {.shares = {2, 2}});
  step.start();
  int looks = 0;
  EXPECT_FALSE(step.wait([&] { return ++looks < 2; })) << "it waits its turn";
  step.cancel();
  EXPECT_TRUE(step.wait());
  EXPECT_THROW(step.rethrow_failure(), Cancelled);
  holding->go = true;
  holding->go.notify_all();
  EXPECT_TRUE(before.wait());
  EXPECT_EQ(before.failure(), nullptr);
  run_step(group, std::make_shared<CountingProgram>(4, 1, false), {.shares = {2, 2}});
  for (const auto& times : program->times_) EXPECT_EQ(times, 0);
}

TEST(SharedDevices, AreWaitedForByALoopOfTheSameGroup) {
  const DeviceGroup group = host_group(2);
  for (const DeviceGroup& other : {group, group.share()}) {
    const auto holding = std::make_shared<Holding>();
    Step before(other, holding, {.shares = {1, 1}, .stealing = false});
    before.start();
    while (holding->entered < 2) std::this_thread::yield();
    const auto program = std::make_shared<CountingProgram>(4, 1, false);
    StepLoop loop(group, {});
    const std::shared_ptr<Step> step = loop.begin(loop.plan(4), program);
    int looks = 0;
    EXPECT_FALSE(step->wait([&] { return ++looks < 2; })) << "it waits its turn";
    EXPECT_THROW(loop.require_idle(), InvalidArgument) << "its own step has not ended";
    holding->go = true;
    holding->go.notify_all();
    EXPECT_TRUE(step->wait());
    for (const auto& times : program->times_) EXPECT_EQ(times, 1);
    EXPECT_TRUE(before.wait());
    EXPECT_EQ(before.failure(), nullptr);
  }
}

TEST(SharedDevices, AreNotWaitedForByAPipelineThatIsCancelledBeforeItsTurn) {
  const DeviceGroup group = host_group(2);
  for (const bool one_has_come : {false, true}) {
    const DeviceGroup other(one_has_come ? std::vector<Device>{group.devices()[1]} : group.devices());
    const auto holding = std::make_shared<Holding>();
    Step before(other, holding, {.shares = std::vector<std::int64_t>(other.size(), 1), .stealing = false});
    before.start();
    while (holding->entered < static_cast<int>(other.size())) std::this_thread::yield();
    std::atomic<int> ran{0};
    const auto program = std::make_shared<CallingProgram>([&](const StageAction&) { ++ran; });
    PipelineStep step(group, program, plan::gpipe(2, 3), {0, 1});
    step.start();
    int looks = 0;
    EXPECT_FALSE(step.wait([&] { return ++looks < 2; })) << "it waits its turn";
    step.cancel();
    EXPECT_TRUE(step.wait([look = 0]() mutable { return ++look < 100; })) << "it waits for the step before it";
    EXPECT_THROW(step.rethrow_failure(), Cancelled);
    const int until_then = ran;
    holding->go = true;
    holding->go.notify_all();
    EXPECT_TRUE(before.wait());
    PipelineStep after(group, std::make_shared<CallingProgram>([](const StageAction&) {}), plan::gpipe(2, 3), {0, 1});
    after.start();
    EXPECT_TRUE(after.wait());
    EXPECT_EQ(after.failure(), nullptr);
    EXPECT_EQ(ran, until_then);
  }
}

}  // namespace
}  // namespace paceline

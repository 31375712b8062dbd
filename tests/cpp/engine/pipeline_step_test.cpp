// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/engine/pipeline_step.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/schedule.hpp>

#include "host_group.hpp"
#include "pipeline_programs.hpp"

namespace paceline {
namespace {

using Kind = plan::Action::Kind;

std::vector<DeviceId> shuffled_devices(std::mt19937_64& rng, std::size_t stages, std::vector<DeviceId> order) {
  std::shuffle(order.begin(), order.end(), rng);
  order.resize(stages);
  return order;
}

plan::Schedule random_schedule(std::mt19937_64& rng, std::size_t stages) {
  const auto micro_batches = static_cast<std::int64_t>(1 + rng() % 9);
  std::vector<std::int64_t> extra(stages);
  for (auto& one : extra) one = static_cast<std::int64_t>(rng() % 3);
  switch (rng() % 3) {
    case 0:
      return plan::gpipe(stages, micro_batches);
    case 1:
      return plan::forward_only(stages, micro_batches);
    default:
      return plan::one_f_one_b(stages, micro_batches, extra);
  }
}

TEST(PipelineStep, RunsEachActionOnceAfterItsInputsAndHoldsNoMoreInFlightThanTheScheduleSays) {
  const DeviceGroup group = host_group(4);
  std::mt19937_64 rng(17);
  for (int round = 0; round < 300; ++round) {
    const std::size_t stages = 1 + rng() % 4;
    const plan::Schedule schedule = random_schedule(rng, stages);
    const std::vector<DeviceId> devices = shuffled_devices(rng, stages, group.ids());
    const auto program = std::make_shared<CheckingProgram>(schedule, devices);
    PipelineStep step(group, program, schedule, devices);
    step.start();
    ASSERT_TRUE(step.wait());
    ASSERT_EQ(step.failure(), nullptr);
    ASSERT_NO_THROW(step.rethrow_failure());
    EXPECT_TRUE(program->problems().empty()) << program->problems().front();
    EXPECT_EQ(program->ran(), program->expected());
    const auto record = step.record();
    ASSERT_EQ(record.size(), stages);
    for (std::size_t s = 0; s < stages; ++s) {
      ASSERT_EQ(record[s].size(), schedule.stages[s].size());
      double before = 0.0;
      for (std::size_t k = 0; k < record[s].size(); ++k) {
        EXPECT_EQ(record[s][k].action.kind, schedule.stages[s][k].kind);
        EXPECT_EQ(record[s][k].action.micro_batch, schedule.stages[s][k].micro_batch);
        EXPECT_EQ(record[s][k].action.device, devices[s]);
        EXPECT_LE(before, record[s][k].start_seconds);
        EXPECT_LE(record[s][k].start_seconds, record[s][k].finish_seconds);
        before = record[s][k].finish_seconds;
      }
    }
  }
}

TEST(PipelineStep, ReportsOneOfSeveralFailuresAndRunsNoActionTwice) {
  const DeviceGroup group = host_group(3);
  const plan::Schedule schedule = plan::gpipe(3, 4);
  for (int round = 0; round < 200; ++round) {
    std::latch together(3);
    std::atomic<int> failures{0};
    const auto program = std::make_shared<CallingProgram>([&](const StageAction& action) {
      if (action.kind != Kind::forward || action.micro_batch != 2 - static_cast<std::int64_t>(action.stage)) return;
      together.arrive_and_wait();
      ++failures;
      throw std::bad_alloc();
    });
    PipelineStep step(group, program, schedule, {0, 1, 2});
    step.start();
    ASSERT_TRUE(step.wait());
    EXPECT_EQ(failures, 3);
    EXPECT_THROW(step.rethrow_failure(), OutOfMemory);
  }
}

TEST(PipelineStep, CancellingWhatIsOverChangesNothing) {
  const DeviceGroup group = host_group(2);
  const plan::Schedule schedule = plan::one_f_one_b(2, 2);
  const auto program = std::make_shared<CheckingProgram>(schedule, std::vector<DeviceId>{0, 1});
  PipelineStep step(group, program, schedule, {0, 1});
  step.start();
  ASSERT_TRUE(step.wait());
  step.cancel();
  EXPECT_EQ(step.failure(), nullptr);
}

TEST(PipelineStep, MayBeCancelledBeforeItStarts) {
  const DeviceGroup group = host_group(2);
  const plan::Schedule schedule = plan::one_f_one_b(2, 6);
  const auto program = std::make_shared<CheckingProgram>(schedule, std::vector<DeviceId>{0, 1});
  PipelineStep step(group, program, schedule, {0, 1});
  step.cancel();
  step.start();
  ASSERT_TRUE(step.wait());
  EXPECT_THROW(step.rethrow_failure(), Cancelled);
  EXPECT_EQ(program->ran(), 0U);
}

TEST(PipelineStep, MayBeDestroyedWhileAnActionRuns) {
  std::latch inside(1);
  std::latch go(1);
  std::weak_ptr<PipelineProgram> kept;
  {
    const DeviceGroup group = host_group(2);
    auto program = std::make_shared<CallingProgram>([&](const StageAction&) {
      inside.count_down();
      go.wait();
    });
    kept = program;
    {
      PipelineStep step(group, std::move(program), plan::one_f_one_b(2, 1), {0, 1});
      step.start();
      inside.wait();
      EXPECT_FALSE(step.wait([] { return false; }));
    }
    EXPECT_FALSE(kept.expired()) << "the worker still runs it";
    go.count_down();
  }
  EXPECT_TRUE(kept.expired());
}

TEST(PipelineStep, RefusesDevicesThatDoNotFitTheStages) {
  const DeviceGroup group = host_group(2);
  const plan::Schedule schedule = plan::one_f_one_b(2, 3);
  const auto program = std::make_shared<CallingProgram>([](const StageAction&) {});
  EXPECT_THROW(PipelineStep(group, program, schedule, {0}), InvalidArgument);
  EXPECT_THROW(PipelineStep(group, program, schedule, {0, 0}), InvalidArgument);
  EXPECT_THROW(PipelineStep(group, program, schedule, {0, 2}), InvalidArgument);
  plan::Schedule without_forward = schedule;
  without_forward.stages[1].erase(without_forward.stages[1].begin());
  EXPECT_THROW(PipelineStep(group, program, without_forward, {0, 1}), InvalidArgument);
}

}  // namespace
}  // namespace paceline

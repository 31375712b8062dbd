// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/engine/lanes.hpp>
#include <paceline/engine/pipeline_step.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/schedule.hpp>

#include "host_group.hpp"
#include "pipeline_programs.hpp"

namespace paceline {
namespace {

using Kind = plan::Action::Kind;

std::vector<DeviceId> first_of(const DeviceGroup& group, std::size_t count) {
  return {group.ids().begin(), group.ids().begin() + static_cast<std::ptrdiff_t>(count)};
}

/// A step of two or more stages on lanes. `body` gets the lanes, its lane and its micro-batch.
struct LaneStep {
  using Body = std::function<void(Lanes&, std::size_t, std::int64_t)>;

  LaneStep(const DeviceGroup& group, LaneThreads& threads, plan::Schedule schedule, Body call)
      : body(std::move(call)), devices(first_of(group, schedule.stages.size())) {
    lanes = std::make_shared<Lanes>(
        threads, schedule, [this](std::size_t lane, std::int64_t micro_batch) { body(*lanes, lane, micro_batch); });
    step.emplace(group, lanes, std::move(schedule), devices);
  }

  void run() {
    step->start();
    ASSERT_TRUE(step->wait());
    ASSERT_TRUE(lanes->wait());
  }

  Body body;
  std::vector<DeviceId> devices;
  std::shared_ptr<Lanes> lanes;
  std::optional<PipelineStep> step;
};

/// Visits every stage, with `checker` around each action.
LaneStep::Body visiting(ActionChecker& checker) {
  return [&checker](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
    for (auto action = lanes.current(micro_batch); action; action = lanes.advance(micro_batch)) {
      checker.begin(*action);
      checker.end(*action);
    }
  };
}

void expect_works(const DeviceGroup& group, LaneThreads& threads, const plan::Schedule& schedule) {
  ActionChecker checker(schedule, first_of(group, schedule.stages.size()));
  LaneStep step(group, threads, schedule, visiting(checker));
  step.run();
  EXPECT_EQ(step.step->failure(), nullptr);
  EXPECT_TRUE(checker.problems().empty()) << checker.problems().front();
  EXPECT_EQ(checker.ran(), checker.expected());
}

TEST(Lanes, CarryEachMicroBatchThroughEachActionOnceAndInOrder) {
  const DeviceGroup group = host_group(4);
  LaneThreads threads;
  std::mt19937_64 rng(5);
  for (int round = 0; round < 120; ++round) {
    const std::size_t stages = 1 + rng() % 4;
    const auto micro_batches = static_cast<std::int64_t>(1 + rng() % 7);
    std::vector<std::int64_t> extra(stages);
    for (auto& one : extra) one = static_cast<std::int64_t>(rng() % 3);
    const int kind = static_cast<int>(rng() % 3);
    SCOPED_TRACE(round);
    expect_works(group, threads,
                 kind == 0   ? plan::gpipe(stages, micro_batches)
                 : kind == 1 ? plan::forward_only(stages, micro_batches)
                             : plan::one_f_one_b(stages, micro_batches, extra));
  }
  EXPECT_LE(threads.size(), 7U);
}

TEST(Lanes, RunBackwardsInAnyOrder) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  expect_works(group, threads, plan::schedule_of("F0 F1 B1 F2 B2 F3 B0 B3\nF0 F1 B1 F2 B2 B0 F3 B3"));
  EXPECT_EQ(threads.size(), 2U);
}

TEST(Lanes, RunOnTheCoresOfTheDeviceWhoseTurnTheyHave) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  std::atomic<int> elsewhere{0};
  LaneStep step(group, threads, plan::one_f_one_b(2, 4), [&](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
    for (auto action = lanes.current(micro_batch); action; action = lanes.advance(micro_batch)) {
      const std::vector<int>& cores = group.device(action->device).cores;
      if (!cores.empty() && std::find(cores.begin(), cores.end(), sched_getcpu()) == cores.end()) ++elsewhere;
    }
  });
  step.run();
  EXPECT_EQ(elsewhere, 0);
}

TEST(Lanes, OverlapOnDifferentStages) {
  const DeviceGroup group = host_group(3);
  LaneThreads threads;
  for (const plan::Schedule& schedule : {plan::one_f_one_b(3, 4), plan::forward_only(3, 4)}) {
    std::latch together(3);
    LaneStep step(group, threads, schedule, [&](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
      for (auto action = lanes.current(micro_batch); action; action = lanes.advance(micro_batch)) {
        if (action->kind == Kind::forward && micro_batch == 2 - static_cast<std::int64_t>(action->stage)) {
          together.arrive_and_wait();
        }
      }
    });
    step.run();
    EXPECT_EQ(step.step->failure(), nullptr);
  }
}

TEST(Lanes, GiveBackTheTurnsOfABodyThatReturnsEarly) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  for (int advances = 0; advances < 4; ++advances) {
    LaneStep step(group, threads, plan::one_f_one_b(2, 5), [&](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
      for (int k = 0; k < (micro_batch % 2 == 0 ? advances : 3); ++k) {
        ASSERT_TRUE(lanes.advance(micro_batch));
      }
    });
    step.run();
    EXPECT_EQ(step.step->failure(), nullptr);
    for (const auto& stage : step.step->record()) EXPECT_EQ(stage.size(), 10U);
  }
}

TEST(Lanes, HaveNoTurnForABodyThatAdvancesTooOften) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  LaneStep step(group, threads, plan::one_f_one_b(2, 3), [&](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
    for (int k = 0; k < 3; ++k) ASSERT_TRUE(lanes.advance(micro_batch));
    for (int k = 0; k < 2; ++k) {
      EXPECT_FALSE(lanes.advance(micro_batch));
      EXPECT_FALSE(lanes.current(micro_batch));
    }
    EXPECT_THROW(lanes.advance(3), InvalidArgument);
    EXPECT_THROW(lanes.advance(-1), InvalidArgument);
  });
  step.run();
  EXPECT_EQ(step.step->failure(), nullptr);
}

TEST(Lanes, ABodyThatThrowsFailsTheActionWhoseTurnItHas) {
  const DeviceGroup group = host_group(3);
  LaneThreads threads;
  const plan::Schedule schedule = plan::one_f_one_b(3, 5);
  for (std::size_t stage = 0; stage < 3; ++stage) {
    for (const Kind kind : {Kind::forward, Kind::backward}) {
      for (const std::int64_t failing : {0, 3, 4}) {
        LaneStep step(group, threads, schedule, [&](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
          auto action = lanes.current(micro_batch);
          for (; action; action = lanes.advance(micro_batch)) {
            if (micro_batch == failing && action->stage == stage && action->kind == kind) {
              throw std::out_of_range("no such row");
            }
          }
        });
        step.run();
        const PipelineFailure* failure = step.step->failure();
        ASSERT_NE(failure, nullptr);
        EXPECT_EQ(failure->action.stage, stage);
        EXPECT_EQ(failure->action.kind, kind);
        EXPECT_EQ(failure->action.micro_batch, failing);
        EXPECT_THROW(step.step->rethrow_failure(), Error);
        EXPECT_THROW(std::rethrow_exception(failure->error), std::out_of_range);
      }
    }
  }
  expect_works(group, threads, schedule);
}

TEST(Lanes, ComeBackFromACancelledStep) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  const plan::Schedule schedule = plan::gpipe(2, 4);
  std::latch inside(1);
  std::latch cancelled(1);
  std::atomic<int> ended_early{0};
  LaneStep step(group, threads, schedule, [&](Lanes& lanes, std::size_t, std::int64_t micro_batch) {
    if (micro_batch == 1) {
      inside.count_down();
      cancelled.wait();
    }
    while (lanes.advance(micro_batch)) {
    }
    ++ended_early;
  });
  step.step->start();
  std::thread other([&] {
    inside.wait();
    step.step->cancel();
    cancelled.count_down();
  });
  ASSERT_TRUE(step.step->wait());
  ASSERT_TRUE(step.lanes->wait());
  other.join();
  EXPECT_THROW(step.step->rethrow_failure(), Cancelled);
  EXPECT_GT(ended_early, 0);
  expect_works(group, threads, schedule);
}

TEST(Lanes, ALaneThatIsStillInItsBodyTakesPartInTheNextStepWhenItHasLeft) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  const plan::Schedule schedule = plan::one_f_one_b(2, 3);
  std::latch go(1);
  LaneStep stuck(group, threads, schedule, [&](Lanes& lanes, std::size_t lane, std::int64_t micro_batch) {
    while (lanes.advance(micro_batch)) {
    }
    if (lane == 1) go.wait();
  });
  stuck.step->start();
  ASSERT_TRUE(stuck.step->wait());
  EXPECT_FALSE(stuck.lanes->wait([] { return false; }));
  std::thread other([&] { go.count_down(); });
  for (int k = 0; k < 3; ++k) expect_works(group, threads, schedule);
  other.join();
  EXPECT_TRUE(stuck.lanes->wait());
}

TEST(Lanes, AStuckLaneIsLeftBehindWhenItsThreadsAreClosed) {
  const DeviceGroup group = host_group(2);
  auto left = std::make_shared<std::latch>(1);
  auto go = std::make_shared<std::latch>(1);
  {
    LaneThreads threads;
    LaneStep step(group, threads, plan::one_f_one_b(2, 2), [go, left](Lanes& lanes, std::size_t lane, std::int64_t m) {
      while (lanes.advance(m)) {
      }
      if (lane != 0) return;
      const auto mine = left;
      go->wait();
      mine->count_down();
    });
    step.step->start();
    ASSERT_TRUE(step.step->wait());
    EXPECT_FALSE(step.lanes->wait([] { return false; }));
    threads.close();
    EXPECT_EQ(threads.size(), 0U);
    go->count_down();
    left->wait();
    ASSERT_TRUE(step.lanes->wait());
  }
}

TEST(Lanes, MayDestroyTheirThreadsFromABody) {
  const DeviceGroup group = host_group(2);
  auto threads = std::make_shared<LaneThreads>();
  auto lanes =
      std::make_shared<Lanes>(*threads, plan::one_f_one_b(2, 1), [&](std::size_t, std::int64_t) { threads.reset(); });
  PipelineStep step(group, lanes, plan::one_f_one_b(2, 1), {0, 1});
  step.start();
  ASSERT_TRUE(step.wait());
  ASSERT_TRUE(lanes->wait());
  EXPECT_EQ(step.failure(), nullptr);
}

TEST(Lanes, AreForOneStepOfTheirSchedule) {
  const DeviceGroup group = host_group(2);
  LaneThreads threads;
  const plan::Schedule schedule = plan::one_f_one_b(2, 2);
  LaneStep step(group, threads, schedule, [](Lanes&, std::size_t, std::int64_t) {});
  step.run();
  PipelineStep again(group, step.lanes, schedule, step.devices);
  again.start();
  ASSERT_TRUE(again.wait());
  EXPECT_THROW(again.rethrow_failure(), InvalidArgument);

  threads.close();
  LaneStep late(group, threads, schedule, [](Lanes&, std::size_t, std::int64_t) {});
  late.run();
  EXPECT_THROW(late.step->rethrow_failure(), Unavailable);
}

/// The exit status of a child that calls `body`; one that hangs is ended by a signal.
int status_of_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    body();
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(Lanes, AreOnlyDroppedInAForkedChild) {
  const DeviceGroup group = host_group(2);
  const plan::Schedule schedule = plan::one_f_one_b(2, 3);
  auto threads = std::make_unique<LaneThreads>();
  expect_works(group, *threads, schedule);
  EXPECT_EQ(status_of_child([&] { threads.reset(); }), 0) << "of idle lanes";
  std::latch inside(1);
  std::latch go(1);
  auto step = std::make_unique<LaneStep>(group, *threads, schedule, [&](Lanes&, std::size_t, std::int64_t m) {
    if (m != 0) return;
    inside.count_down();
    go.wait();
  });
  step->step->start();
  inside.wait();
  const auto drop = [&] {
    step.reset();
    threads.reset();
  };
  EXPECT_EQ(status_of_child(drop), 0) << "while a lane is in its body";
  go.count_down();
  ASSERT_TRUE(step->step->wait());
  ASSERT_TRUE(step->lanes->wait());
  expect_works(group, *threads, schedule);
}

}  // namespace
}  // namespace paceline

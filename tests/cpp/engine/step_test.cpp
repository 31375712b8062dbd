// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>

#include "counting_program.hpp"
#include "errors.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

StepOptions random_options(std::mt19937_64& rng, std::size_t devices, std::int64_t batch) {
  StepOptions options;
  std::int64_t left = batch;
  for (std::size_t d = 0; d < devices; ++d) {
    const std::int64_t share =
        d + 1 == devices ? left : static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(left + 1));
    options.shares.push_back(share);
    left -= share;
    options.models.push_back(plan::CostModel::affine(1e-5, 1e-6));
    options.noise.push_back(0.3);
  }
  options.micro_batch = rng() % 2 == 0 ? 0 : static_cast<std::int64_t>(1 + rng() % 20);
  return options;
}

TEST(Step, RunsEveryItemOnceUnderStealingDelaysAndExceptions) {
  const DeviceGroup group = host_group(3);
  std::mt19937_64 rng(2026);
  int failed = 0;
  for (int round = 0; round < 1200; ++round) {
    const std::int64_t batch = 1 + static_cast<std::int64_t>(rng() % 120);
    const bool throws = round % 4 == 0;
    auto program = std::make_shared<CountingProgram>(batch, rng(), throws);
    const StepOptions options = random_options(rng, group.size(), batch);
    SCOPED_TRACE(round);
    try {
      const StepRecord record = run_step(group, program, options);
      for (const auto& times : program->times_) ASSERT_EQ(times.load(), 1);
      EXPECT_EQ(program->total_, static_cast<double>(batch));
      for (std::size_t d = 0; d < group.size(); ++d) {
        const bool ran = program->sums_[d] > 0.0;
        EXPECT_LE(program->finished_[d].load(), options.shares[d] > 0 ? 1 : 0);
        EXPECT_GE(program->finished_[d].load(), ran ? 1 : 0);
      }
      std::int64_t items = 0;
      for (const std::int64_t n : record.items(group.ids())) items += n;
      EXPECT_EQ(items, batch);
      EXPECT_GT(record.reduce_seconds, 0.0);
      EXPECT_EQ(record.timings(group.ids()).reduction_seconds, record.reduce_seconds) << "the balancer's";
    } catch (const Error& error) {
      ++failed;
      ASSERT_TRUE(throws);
      EXPECT_TRUE(says(error, "thrown by the body"));
      EXPECT_EQ(error.device().rfind("host:", 0), 0u);
      EXPECT_EQ(program->total_, -1.0) << "a failed step must not reduce";
      for (const auto& times : program->times_) ASSERT_LE(times.load(), 1);
    }
  }
  EXPECT_GT(failed, 50);
}

TEST(StepRecord, CountsTheDevicesThatItIsAskedForByTheirIds) {
  const DeviceId ids[] = {1, 4};  // the other devices have left
  StepRecord record;
  record.claims = {{{.begin = 0, .end = 3, .device = 4}, 0.0, 2.0}, {{.begin = 3, .end = 4, .device = 1}, 0.0, 1.0}};
  EXPECT_EQ(record.items(ids), (std::vector<std::int64_t>{1, 3}));
  const balance::StepTimings timings = record.timings(ids);
  ASSERT_EQ(timings.devices.size(), 2U);
  EXPECT_EQ(timings.devices[0].front().seconds, 1.0);
  EXPECT_EQ(timings.devices[1].front().seconds, 2.0);
  EXPECT_THROW((void)record.items(std::span(ids).first(1)), InvalidArgument);
}

TEST(Step, CountsWaitsThatAProgramTakesOutOfItsWorkForNoPartOfTheReduction) {
  const DeviceGroup group = host_group(2);
  class Waiting final : public StepProgram {
   public:
    bool run(const MicroBatch& /*mb*/) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return false;
    }
    void stamp(std::vector<ClaimRecord>& claims) const override {
      for (ClaimRecord& claim : claims) claim.finish_seconds = claim.start_seconds;
    }
  };
  const StepRecord record = run_step(group, std::make_shared<Waiting>(), {.shares = {1, 1}});
  for (const ClaimRecord& claim : record.claims) EXPECT_EQ(claim.seconds(), 0.0);
  EXPECT_GE(record.compute_seconds, 5e-3);
  EXPECT_LE(record.reduce_seconds, record.step_seconds - record.compute_seconds + 1e-9);
}

TEST(Step, PlacesItsTimesOnTheSteadyClock) {
  const DeviceGroup group = host_group(2);
  class Noting final : public StepProgram {
   public:
    bool run(const MicroBatch& mb) override {
      inside[mb.device.number()] = std::chrono::steady_clock::now();
      return false;
    }
    std::array<std::chrono::steady_clock::time_point, 2> inside;
  };
  const auto program = std::make_shared<Noting>();
  const std::chrono::steady_clock::time_point before = std::chrono::steady_clock::now();
  Step step(group, program, {.shares = {1, 1}, .stealing = false});
  step.start();
  step.wait();
  EXPECT_LE(before, step.started());
  const StepRecord record = step.record();
  ASSERT_EQ(record.claims.size(), 2u);
  for (const ClaimRecord& claim : record.claims) {
    const std::chrono::duration<double> inside = program->inside.at(claim.micro_batch.device.number()) - step.started();
    EXPECT_LE(claim.start_seconds, inside.count());
    EXPECT_LE(inside.count(), claim.finish_seconds);
  }
}

/// Complete at once for the caller, while one worker is delayed in it, as when the system gives its core to other
/// programs.
class HoldingUp final : public GroupTask {
 public:
  explicit HoldingUp(DeviceId device) : device_(device) {}
  void run(DeviceId d) noexcept override {
    if (d == device_) {
      held_ = true;
      wake_caller();
      held_.notify_all();
      go_.wait(false);
    }
  }
  [[nodiscard]] bool complete() const noexcept override { return held_; }
  void let_go() {
    go_ = true;
    go_.notify_all();
  }

 private:
  DeviceId device_;
  std::atomic<bool> held_{false};
  std::atomic<bool> go_{false};
};

TEST(Step, DoesNotWaitForAWorkerThatHasNothingToDoAnyMore) {
  DeviceGroup group = host_group(3);
  for (const bool left_out : {false, true}) {
    const auto holding = std::make_shared<HoldingUp>(DeviceId(1));
    group.submit(holding);
    ASSERT_TRUE(group.wait(*holding));
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto program = std::make_shared<CountingProgram>(60, 1, false);
      StepOptions options{.shares = {20, 20, 20}};  // the other devices take over its items
      if (left_out) options = {.shares = {30, 0, 30}, .stealing = false};
      const StepRecord record = run_step(group, program, options);
      for (const auto& times : program->times_) ASSERT_EQ(times.load(), 1);
      EXPECT_EQ(record.items(group.ids())[1], 0);
      EXPECT_EQ(program->total_, 60.0);
      EXPECT_EQ(program->finished_[1].load(), 0);
    }
    holding->let_go();
    const auto program = std::make_shared<CountingProgram>(60, 1, false);
    run_step(group, program, {.shares = {20, 20, 20}, .stealing = false});
    EXPECT_EQ(program->sums_[1], 20.0);
  }
}

TEST(Step, WaitsForAWorkerThatHasItsOwnPart) {
  DeviceGroup group = host_group(2);
  const auto holding = std::make_shared<HoldingUp>(DeviceId(1));
  group.submit(holding);
  ASSERT_TRUE(group.wait(*holding));
  const auto program = std::make_shared<CountingProgram>(4, 1, false);
  Step step(group, program, {.shares = {2, 2}, .stealing = false});
  step.start();
  int looks = 0;
  EXPECT_FALSE(step.wait([&] { return ++looks < 2; }));
  holding->let_go();
  EXPECT_TRUE(step.wait());
  EXPECT_EQ(step.items(), (std::vector<std::int64_t>{2, 2}));
}

/// Fails in run() on host:1, or in the reduction.
template <class Thrown>
class Failing final : public StepProgram {
 public:
  Failing(Thrown thrown, bool in_reduction) : thrown_(std::move(thrown)), in_reduction_(in_reduction) {}
  bool run(const MicroBatch& mb) override {
    if (!in_reduction_ && mb.device == 1) throw thrown_;
    return false;
  }
  std::vector<ReductionSegment> reduction() override { throw thrown_; }

 private:
  Thrown thrown_;
  bool in_reduction_;
};

template <class Expected, class Thrown>
void expect_type_survives(const Thrown& thrown) {
  const DeviceGroup group = host_group(2);
  const auto error_of = [&](bool in_reduction) -> std::pair<std::string, std::string> {
    try {
      run_step(group, std::make_shared<Failing<Thrown>>(thrown, in_reduction), {.shares = {4, 4}, .stealing = false});
    } catch (const Expected& error) {
      EXPECT_THROW(std::rethrow_if_nested(error), Thrown);
      return {error.device(), error.what()};
    }
    return {};
  };
  const auto [device, text] = error_of(false);
  EXPECT_EQ(device, group.devices()[1].name);
  EXPECT_TRUE(says(text, "host:1 failed at items [4, 8)"));
  const auto [no_device, reduction] = error_of(true);
  EXPECT_EQ(no_device, "") << "no device is to blame";
  EXPECT_TRUE(says(reduction, "the reduction failed"));
}

TEST(Step, KeepsTheTypeOfAnErrorAndBlamesNoDeviceForTheReduction) {
  expect_type_survives<Timeout>(Timeout("late"));
  expect_type_survives<OutOfMemory>(OutOfMemory("full"));
  expect_type_survives<OutOfMemory>(std::bad_alloc());
  expect_type_survives<DeviceLost>(DeviceLost("gone"));
  expect_type_survives<Unavailable>(Unavailable("not here"));
  expect_type_survives<InvalidArgument>(InvalidArgument("no"));
  expect_type_survives<Error>(std::runtime_error("odd"));
}

/// Both devices fail, each when the other one is running, too.
class BothFail final : public StepProgram {
 public:
  bool run(const MicroBatch& mb) override {
    both_.arrive_and_wait();
    if (mb.device == 0) throw OutOfMemory("full");
    throw Timeout("late");
  }

 private:
  std::barrier<> both_{2};
};

TEST(Step, OfTwoDevicesThatFailAtOnceNamesOneWithItsOwnError) {
  DeviceGroup group = host_group(2);
  for (int repeat = 0; repeat < 50; ++repeat) {
    Step step(group, std::make_shared<BothFail>(), {.shares = {4, 4}, .stealing = false});
    step.start();
    ASSERT_TRUE(step.wait());
    ASSERT_NE(step.failure(), nullptr);
    const DeviceId device = step.failure()->micro_batch->device;
    try {
      step.rethrow_failure();
      FAIL();
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(device, DeviceId(0));
      EXPECT_EQ(error.device(), "host:0");
    } catch (const Timeout& error) {
      EXPECT_EQ(device, DeviceId(1));
      EXPECT_EQ(error.device(), "host:1");
    }
    run_step(group, std::make_shared<CountingProgram>(8, 1, false), {.shares = {4, 4}});  // the next step works
  }
}

TEST(Step, IsNotCancelledOnceTheReductionHasBegun) {
  const DeviceGroup group = host_group(2);
  class Cancelling final : public StepProgram {
   public:
    bool run(const MicroBatch&) override { return false; }
    std::vector<ReductionSegment> reduction() override {
      return {{.inputs = {input.data()}, .output = output.data(), .count = input.size()}};
    }
    std::vector<float> input = std::vector<float>(1 << 20, 1.0F);
    std::vector<float> output = std::vector<float>(1 << 20);
  };
  for (int round = 0; round < 20; ++round) {
    const auto program = std::make_shared<Cancelling>();
    Step step(group, program, {.shares = {1, 1}});
    step.start();
    std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
    step.cancel();
    step.wait();
    const float expected = step.failure() == nullptr ? 1.0F : 0.0F;
    for (const float value : program->output) ASSERT_EQ(value, expected) << "half of a result";
  }
}

TEST(Step, CancelsFromAnotherThreadAndTheNextOneWorks) {
  const DeviceGroup group = host_group(2);
  class Slow final : public StepProgram {
   public:
    bool run(const MicroBatch&) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return false;
    }
  };
  Step step(group, std::make_shared<Slow>(), {.shares = {2000, 2000}, .micro_batch = 1});
  step.start();
  std::jthread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    step.cancel();
  });
  EXPECT_TRUE(step.wait());
  EXPECT_THROW(step.rethrow_failure(), Cancelled);
  EXPECT_NO_THROW(run_step(group, std::make_shared<Slow>(), {.shares = {2, 2}}));
}

TEST(Step, RefusesOptionsThatDoNotFitTheGroup) {
  const DeviceGroup group = host_group(2);
  auto program = std::make_shared<CountingProgram>(4, 1, false);
  EXPECT_THROW(run_step(group, program, {.shares = {4}}), InvalidArgument);
  EXPECT_THROW(run_step(group, program, {.shares = {0, 0}}), InvalidArgument);
  EXPECT_THROW(run_step(group, program, {.shares = {5, -1}}), InvalidArgument);
  EXPECT_THROW(run_step(group, program, {.shares = {2, 2}, .noise = {0.1}}), InvalidArgument);
}

TEST(Step, RefusesAScriptThatDoesNotHaveEveryItemOnce) {
  const DeviceGroup group = host_group(2);
  const auto program = std::make_shared<CountingProgram>(10, 1, false);
  const auto run = [&](std::vector<std::vector<MicroBatch>> script) {
    run_step(group, program, {.shares = {5, 5}, .script = std::move(script)});
  };
  EXPECT_THROW(run({{{.begin = 0, .end = 10}}}), InvalidArgument);                           // one list is missing
  EXPECT_THROW(run({{{.begin = 0, .end = 5}}, {{.begin = 5, .end = 9}}}), InvalidArgument);  // the last item is missing
  EXPECT_THROW(run({{{.begin = 0, .end = 6}}, {{.begin = 5, .end = 10}}}), InvalidArgument);  // one item is there twice
  EXPECT_THROW(run({{{.begin = 0, .end = 4}}, {{.begin = 5, .end = 10}}}), InvalidArgument);  // a gap
  EXPECT_THROW(run({{{.begin = 0, .end = 10}, {.begin = 4, .end = 4}}, {}}), InvalidArgument);
  run({{}, {{.begin = 4, .end = 10}, {.begin = 0, .end = 4}}});
  for (const auto& times : program->times_) EXPECT_EQ(times.load(), 1);
  EXPECT_EQ(program->sums_[1], 10.0);
}

class Never final : public Event {
 public:
  [[nodiscard]] bool done() const override { return false; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "fake:0"; }
};

/// Its first device waits for what never comes.
class Late : public StepProgram {
 public:
  bool run(const MicroBatch&) override { return false; }
  [[nodiscard]] const Event* slot(DeviceId device) override { return device == 0 ? &never_ : nullptr; }
  [[nodiscard]] std::chrono::nanoseconds patience() const override { return std::chrono::milliseconds(1); }

 private:
  Never never_;
};

/// Runs the step, but not for ever.
void run(const std::shared_ptr<StepProgram>& program) {
  int looks = 0;
  run_step(host_group(2), program, {.shares = {1, 1}, .stealing = false}, [&] { return ++looks < 100; });
}

TEST(StepPatience, EndsAStepWhoseProgramDoesNotSayWhatThen) {
  const auto error = thrown_by<Timeout>([&] { run(std::make_shared<Late>()); });
  EXPECT_EQ(error.device(), "fake:0");
  EXPECT_TRUE(says(error, "what was enqueued has not ended"));
}

TEST(StepPatience, EndsAStepWithWhatItsProgramSays) {
  class Saying final : public Late {
    void give_up(const Event&) override { throw DeviceLost("it is gone"); }
  };
  EXPECT_THROW(run(std::make_shared<Saying>()), DeviceLost);
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// Steps whose caller never waits: what is known of their devices' speeds, and how far ahead the caller gets.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <ranges>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>

#include "orders.hpp"
#include "queued_steps.hpp"
#include "shortage.hpp"

namespace paceline {
namespace {

TEST(StepTimes, WhatADeviceWaitsForIsNoTimeOfItsOwn) {
  bring_seconds = 100.0;
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
      const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
      StepLoop step_loop(group, {.balance = Balance::even, .micro_batch = 3});
      auto program = std::make_shared<Summing>(group);
      const std::unique_ptr<Buffer> output = program->queues.maker(0).allocate_pinned(sizeof(double));
      program->begin(1.0, static_cast<double*>(output->data()));
      const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program);
      step->wait();
      ASSERT_EQ(step->failure(), nullptr);
      step_loop.commit(step);
      step_loop.settle();
      double seconds = 0.0;
      for (const ClaimRecord& claim : step_loop.last_step().claims)
        seconds += claim.finish_seconds - claim.start_seconds;
      ASSERT_NEAR(seconds, 1e-3 * kBatch, 1e-4) << "seed " << seed;
      program->queues.drain();
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
  }
  bring_seconds = 0.0;
}

TEST(StepTimes, OfAClaimInPiecesIsTheSumOfItsPieces) {
  boot(1, 1);
  const DeviceGroup group = group_of({"cuda:0"});
  StepLoop step_loop(group, {.micro_batch = 6});
  auto program = std::make_shared<Summing>(group);
  const std::unique_ptr<Buffer> output = program->queues.maker(0).allocate_pinned(sizeof(double));
  for (const bool in_pieces : {false, true}) {
    program->begin(1.0, static_cast<double*>(output->data()));
    const auto plan = step_loop.plan(kBatch);
    StepScript script;
    auto& claims = script.claims.emplace_back();
    auto& pieces = script.pieces.emplace_back();
    for (std::int64_t k = 0; k < kBatch; k += 6) {
      claims.push_back({.begin = k, .end = std::min<std::int64_t>(k + 6, kBatch)});
      for (std::int64_t i = k; i < claims.back().end; ++i) pieces.push_back({.begin = i, .end = i + 1});
    }
    if (!in_pieces) script.pieces.clear();
    const std::shared_ptr<Step> step = step_loop.prepare(plan, program, script);
    step->start();
    step->wait();
    ASSERT_EQ(step->failure(), nullptr);
    EXPECT_EQ(step->micro_batches(), in_pieces ? kBatch : std::ssize(claims));
    step_loop.commit(step);
    step_loop.settle();
    ASSERT_EQ(std::ssize(step_loop.last_step().claims), std::ssize(claims));
    for (const ClaimRecord& claim : step_loop.last_step().claims) {
      EXPECT_NEAR(claim.finish_seconds - claim.start_seconds, 1e-3 * static_cast<double>(claim.micro_batch.size()),
                  1e-4);
    }
    EXPECT_EQ(*static_cast<double*>(output->data()), static_cast<double>(kBatch));
  }
  program->queues.drain();
}

TEST(StepTimes, TheCallerIsTwoStepsAheadAtMost) {
  boot(1, 1);
  const DeviceGroup group = group_of({"cuda:0"});
  StepLoop step_loop(group, {});
  Summing any(group);
  const std::unique_ptr<Buffer> output = any.queues.maker(0).allocate_pinned(sizeof(double));
  for (int k = 0; k < 5; ++k) {
    auto program = std::make_shared<Summing>(group);
    program->begin(1.0, static_cast<double*>(output->data()));
    const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program);
    step->wait();
    step_loop.commit(step);
    ASSERT_GE(step_loop.metrics().steps, k - 1);
  }
}

TEST(StepTimes, CostsThatAlternateAreEvidenceForTheBalancerToo) {
  boot(1, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
  StepLoop step_loop(group, {});
  Summing any(group);
  const std::unique_ptr<Buffer> output = any.queues.maker(0).allocate_pinned(sizeof(double));
  constexpr int kSteps = 8;
  for (int k = 0; k < kSteps; ++k) {
    auto program = std::make_shared<Summing>(group);
    program->begin(1.0, static_cast<double*>(output->data()));
    const std::vector<double> costs(kBatch, k % 2 == 0 ? 1.0 : 3.0);
    const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(costs), program);
    step->wait();
    ASSERT_EQ(step->failure(), nullptr);
    step_loop.commit(step);
  }
  step_loop.settle();
  EXPECT_EQ(step_loop.balancer().report().steps, kSteps);
}

/// One run of 1 ms by the device's clock. `slowly`: its launch takes 10 ms of the host, and the device is there at
/// once.
struct Launched {
  bool slowly = false;
  double seconds = 1e-3;
};

bool excluded(DeviceQueues& queues, const Launched& run) {
  const auto stream = queues.stream(0)->native();
  const std::shared_ptr<const StepTimes> times = queues.begin_step({});
  queues.enter(0);
  if (!run.slowly) fake::hang(stream);
  queues.begin_run(0);
  if (run.slowly) {
    const std::unique_ptr<Event> there = queues.maker(0).make_event(false);
    queues.stream(0)->record(*there);
    wait_for(*there);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  bring_seconds = run.seconds;
  launch(&slow_kernel, *queues.stream(0), 0);
  queues.end_run(0);
  if (!run.slowly) fake::go_on(stream);
  queues.deliver(0, {});
  queues.reduce();
  queues.end_step();
  times->wait();
  std::vector<ClaimRecord> claims(1);
  times->stamp(claims);
  std::vector<ClaimRecord> again(1);
  times->stamp(again);
  EXPECT_EQ(again[0].excluded, claims[0].excluded) << "the same answer however often it is asked";
  return claims[0].excluded;
}

TEST(StepTimes, TheTimeOfLaunchingIsNoEvidenceWhereThereIsBetter) {
  boot(1, 1);
  DeviceQueues queues(group_of({"cuda:0"}), {});
  EXPECT_FALSE(excluded(queues, {.slowly = true})) << "there is no other";
  EXPECT_FALSE(excluded(queues, {.slowly = false})) << "all was launched before the device came to it";
  EXPECT_FALSE(excluded(queues, {.slowly = true, .seconds = 10.0})) << "launching was ahead";
  for (int step = 0; step < 8; ++step) EXPECT_TRUE(excluded(queues, {.slowly = true})) << step;
  EXPECT_FALSE(excluded(queues, {.slowly = true})) << "what is better is long ago";
  EXPECT_FALSE(excluded(queues, {.slowly = false}));
  EXPECT_TRUE(excluded(queues, {.slowly = true}));
}

/// Steps of two GPUs, the second of which gets its parameters late.
class LateParameters {
 public:
  /// Two buckets, each of which takes so long.
  explicit LateParameters(double seconds, bool at_once = true, std::vector<std::size_t> needs = {})
      : group_(group_of({"cuda:0", "cuda:1"})),
        program_(std::make_shared<Summing>(group_, 1, Transport::copies)),
        here_(queues().allocate(0, 8, &queues().home_stream())),
        there_(queues().allocate(1, 8, queues().copy_stream(1))),
        output_(queues().maker(0).allocate_pinned(sizeof(double))) {
    fake::set_peer_copy_seconds(seconds);
    for (const std::size_t bucket : {0, 1}) {
      program_->parameters.push_back({1, there_->data(), here_->data(), 8, bucket});
    }
    program_->at_once = at_once;
    program_->needs = std::move(needs);
  }
  ~LateParameters() { queues().drain(); }
  LateParameters(const LateParameters&) = delete;
  LateParameters& operator=(const LateParameters&) = delete;

  [[nodiscard]] const DeviceGroup& group() const { return group_; }

  void step(StepLoop& step_loop) {
    program_->begin(1.0, static_cast<double*>(output_->data()));
    const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program_);
    step->wait();
    ASSERT_EQ(step->failure(), nullptr);
    step_loop.commit(step);
    step_loop.settle();
  }

 private:
  [[nodiscard]] DeviceQueues& queues() const { return program_->queues; }

  DeviceGroup group_;
  std::shared_ptr<Summing> program_;
  std::unique_ptr<Buffer> here_;
  std::unique_ptr<Buffer> there_;
  std::unique_ptr<Buffer> output_;
};

/// When the last device finishes, of which each begins at some time of the real clock.
double end_of(const StepRecord& record) {
  const auto begins = [](const ClaimRecord& claim) { return claim.start_seconds; };
  return std::ranges::min(record.claims | std::views::transform(begins)) + record.compute_seconds;
}

/// The second device waits for its parameters for 0.25 s, which is lateness and not work.
void expect_lateness(bool at_once, const std::vector<std::size_t>& needs) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    boot(seed, 2);
    LateParameters late(0.125, at_once, needs);
    StepLoop step_loop(late.group(), {.balance = Balance::even, .micro_batch = 3});
    late.step(step_loop);
    const StepRecord& record = step_loop.last_step();
    ASSERT_EQ(record.startup_seconds.size(), 2U);
    EXPECT_EQ(record.startup_seconds[0], 0.0);
    EXPECT_NEAR(record.startup_seconds[1].value_or(0.0), 0.25, 1e-3) << "0.125 for each bucket";
    EXPECT_GT(end_of(record), 0.25) << "a step is as long as its last device takes";
    double seconds = 0.0;
    for (const ClaimRecord& claim : record.claims) seconds += claim.finish_seconds - claim.start_seconds;
    EXPECT_NEAR(seconds, 1e-3 * kBatch, 1e-4) << "and its devices are as fast as ever";
  }
}

TEST(StepTimes, KnowHowLateADeviceHadItsParameters) { expect_lateness(true, {}); }

TEST(StepTimes, KnowThatADeviceBeginsWithItsFirstBucketIfItMay) {
  boot(1, 2);
  LateParameters late(0.125, false);
  StepLoop step_loop(late.group(), {.balance = Balance::even, .micro_batch = 3});
  late.step(step_loop);
  EXPECT_NEAR(step_loop.last_step().startup_seconds[1].value_or(0.0), 0.125, 1e-3);
}

TEST(StepTimes, TakeAWaitForALaterBucketForLatenessNotForWork) { expect_lateness(false, {0, 1}); }

TEST(StepTimes, LetTheBalancerGiveALateDeviceLess) {
  boot(1, 2);
  LateParameters late(0.002);
  StepLoop step_loop(late.group(), {});
  // An item takes 1 ms: 8 items here take as long as 4 items 4 ms later.
  const std::vector<std::int64_t> wanted{8, 4};
  for (int k = 0; k < 200 && (k < 40 || step_loop.plan(kBatch)->shares != wanted); ++k) late.step(step_loop);
  EXPECT_EQ(step_loop.plan(kBatch)->shares, wanted);
  const balance::BalanceReport report = step_loop.balancer().report();
  EXPECT_NEAR(report.devices[1].startup_seconds, 0.004, 1e-4);
  EXPECT_GT(report.devices[1].speed, 0.98) << "it is late, not slow";
}

TEST(StepTimes, AreNotThoseOfAnEarlierStepBeforeTheStepHasEnded) {
  boot(1, 1);
  DeviceQueues queues(group_of({"cuda:0"}), {});
  for (int step = 0; step < 3; ++step) EXPECT_FALSE(excluded(queues, {}));  // their events are used again
  const std::shared_ptr<const StepTimes> times = queues.begin_step({});
  EXPECT_FALSE(times->settled());
  EXPECT_THROW(times->wait(), InvalidArgument);
  queues.enter(0);
  queues.deliver(0, {});
  queues.reduce();
  EXPECT_FALSE(times->settled());
  queues.end_step();
  times->wait();
  EXPECT_TRUE(times->settled());
}

TEST(StepTimes, UseTheEventsOfEarlierStepsAgain) {
  boot(1, 1);
  DeviceQueues queues(group_of({"cuda:0"}), {});
  // A step begins before the queues forget the last one, so two steps make events.
  for (int step = 0; step < 2; ++step) EXPECT_FALSE(excluded(queues, {}));
  const int made = fake::made_events();
  for (int step = 0; step < 3; ++step) EXPECT_FALSE(excluded(queues, {}));
  EXPECT_EQ(fake::made_events(), made);
}

void run_nothing(DeviceQueues& queues) {
  queues.enter(0);
  queues.deliver(0, {});
  queues.reduce();
  queues.end_step();
}

TEST(StepTimes, EndWhereTheListsOfTheirEventsGetNoMemory) {
  boot(1, 1);
  {
    DeviceQueues queues(group_of({"cuda:0"}), {});
    std::shared_ptr<const StepTimes> times = queues.begin_step({});
    run_nothing(queues);
    times->wait();
    const std::shared_ptr<const StepTimes> later = queues.begin_step({});  // the queues let go of those before
    ASSERT_EQ(times.use_count(), 1);
    {
      const Shortage shortage;
      times.reset();  // a destructor that throws would end the program
    }
    run_nothing(queues);
    later->wait();
    queues.drain();
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/balancer.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include <paceline/error.hpp>

#include "errors.hpp"

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

BalancerOptions three(Balance policy = Balance::automatic) {
  BalancerOptions options;
  options.policy = policy;
  for (int i = 0; i < 3; ++i) options.devices.push_back({"host:" + std::to_string(i), "host", {}});
  options.calibrate = false;
  return options;
}

StepTimings proportional(const Shares& shares, const std::vector<double>& speeds) {
  StepTimings timings;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    auto& runs = timings.devices.emplace_back();
    if (shares[i] > 0) runs.push_back({shares[i], 0.001 * static_cast<double>(shares[i]) / speeds[i]});
  }
  return timings;
}

TEST(Balancer, EvenGivesSharesThatDifferByAtMostOne) {
  Balancer balancer(three(Balance::even));
  EXPECT_EQ(balancer.next_plan(100).shares, (Shares{34, 33, 33}));
  EXPECT_EQ(balancer.next_plan(2).shares, (Shares{1, 1, 0}));
}

TEST(Balancer, WeightedKeepsTheRatiosWhateverIsMeasured) {
  BalancerOptions options = three(Balance::weighted);
  options.weights = {2.0, 1.0, 0.0};
  Balancer balancer(options);
  for (int k = 0; k < 20; ++k) {
    const StepPlan plan = balancer.next_plan(90);
    EXPECT_EQ(plan.shares, (Shares{60, 30, 0}));
    balancer.record(proportional(plan.shares, {1.0, 4.0, 1.0}));
  }
  EXPECT_EQ(balancer.move_count(), 0);
  EXPECT_GT(balancer.report().possible_gain, 0.3) << "a fixed policy still says what it costs";
}

TEST(Balancer, FixedPoliciesRespectCapsAndGranularity) {
  BalancerOptions options = three(Balance::even);
  options.devices[0].limits.maximum = 16;
  options.granularity = 8;
  const Shares shares = Balancer(options).next_plan(96).shares;
  EXPECT_EQ(shares, (Shares{16, 40, 40}));
}

TEST(Balancer, TellsTheEngineLittleFixedTimeUntilItIsKnown) {
  const auto timed = [](std::int64_t items) {
    return MicroBatchTiming{items, 0.004 + 0.0001 * static_cast<double>(items)};
  };
  Balancer balancer(three(Balance::even));
  StepPlan plan = balancer.next_plan(96);
  for (int k = 0; k < 4; ++k) {
    balancer.record({.devices = {{timed(32)}, {timed(32)}, {timed(32)}}});
    plan = balancer.next_plan(96);
  }
  EXPECT_LT(plan.models[0].fixed_seconds(), 0.001) << "one size tells nothing of it";
  EXPECT_NEAR(plan.models[0].seconds(32), timed(32).seconds, 1e-4);
  for (int k = 0; k < 60; ++k) {
    balancer.record({.devices = {{timed(24), timed(8)}, {timed(28), timed(4)}, {timed(32)}}});
    plan = balancer.next_plan(96);
  }
  EXPECT_NEAR(plan.models[0].fixed_seconds(), 0.004, 0.0005);
}

TEST(Balancer, RefusesWhatMakesNoSenseByName) {
  const auto message = [](BalancerOptions options) -> std::string {
    try {
      Balancer balancer(std::move(options));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_NE(message({}).find("at least one device"), std::string::npos);
  const auto error = thrown_by<InvalidArgument>([&] { (void)balance_named("fastest"); });
  EXPECT_TRUE(says(error, "\"fastest\""));
  EXPECT_TRUE(says(message(three(Balance::weighted)), "0 weights for 3 devices"));
  BalancerOptions options = three(Balance::weighted);
  options.weights = {1.0, -1.0, 1.0};
  EXPECT_TRUE(says(message(options), "host:1"));
  options.weights = {0.0, 0.0, 0.0};
  EXPECT_TRUE(says(message(options), "zero"));
  options = three(Balance::automatic);
  options.weights = {1.0, 1.0, 1.0};
  EXPECT_TRUE(says(message(options), "weights are for"));
  options = three(Balance::automatic);
  options.granularity = -1;
  EXPECT_TRUE(says(message(options), "granularity is -1"));
  options = three(Balance::even);
  options.granularity = 0;
  EXPECT_TRUE(says(message(options), "granularity is 0"));
}

TEST(Balancer, RefusesRecordsThatCannotBe) {
  Balancer balancer(three());
  EXPECT_THROW(balancer.record({}), InvalidArgument) << "no plan yet";
  EXPECT_THROW(balancer.next_plan(0), InvalidArgument);
  balancer.next_plan(30);
  EXPECT_THROW(balancer.record({.devices = {{}, {}}}), InvalidArgument);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(balancer.record({.devices = {{{10, nan}}, {}, {}}}), InvalidArgument);
  EXPECT_THROW(balancer.record({.devices = {{{10, -1.0}}, {}, {}}}), InvalidArgument);
  balancer.record(proportional({10, 10, 10}, {1, 1, 1}));
  EXPECT_THROW(balancer.record(proportional({10, 10, 10}, {1, 1, 1})), InvalidArgument) << "the plan was used";
}

TEST(Balancer, AFailedStepIsPlannedAgainTheSame) {
  Balancer balancer(three());
  for (int k = 0; k < 2; ++k) balancer.record(proportional(balancer.next_plan(300).shares, {1.0, 1.0, 0.5}));
  const StepPlan first = balancer.next_plan(300);
  const StepPlan again = balancer.next_plan(300);
  EXPECT_TRUE(first.moved);
  EXPECT_EQ(again.shares, first.shares);
  EXPECT_EQ(again.step, first.step);
  EXPECT_EQ(again.moved, first.moved);
  EXPECT_EQ(balancer.move_count(), 1);
}

TEST(Balancer, StolenItemsAreEvidenceOfWhereTheyRan) {
  Balancer balancer(three());
  for (int k = 0; k < 6; ++k) {
    balancer.next_plan(300);
    // The third device was slow, so the others took over part of its share in small pieces.
    balancer.record(
        {.devices = {{{100, 0.100}, {20, 0.020}}, {{100, 0.100}, {20, 0.020}}, {{60, 0.120}}}, .step_seconds = 0.12});
  }
  EXPECT_EQ(balancer.next_plan(300).shares, (Shares{120, 120, 60}));
}

TEST(Balancer, BatchSizesMayChangeFromStepToStep) {
  Balancer balancer(three());
  std::int64_t batch = 7;
  for (int k = 0; k < 300; ++k) {
    batch = 1 + (batch * 31 + 17) % 400;
    const StepPlan plan = balancer.next_plan(batch);
    ASSERT_EQ(std::accumulate(plan.shares.begin(), plan.shares.end(), std::int64_t{0}), batch);
    balancer.record(proportional(plan.shares, {1.0, 1.0, 0.5}));
  }
  EXPECT_EQ(balancer.next_plan(1000).shares, (Shares{400, 400, 200}));
}

TEST(Balancer, ARetiredDeviceGetsNothingAndTheLastOneStays) {
  for (const Balance policy : {Balance::automatic, Balance::even, Balance::weighted}) {
    BalancerOptions options = three(policy);
    if (options.policy == Balance::weighted) options.weights = {1.0, 1.0, 1.0};
    Balancer balancer(options);
    balancer.next_plan(90);
    balancer.retire(1);
    EXPECT_EQ(balancer.next_plan(90).shares, (Shares{45, 0, 45})) << name_of(policy);
    balancer.retire(0);
    EXPECT_EQ(balancer.next_plan(90).shares, (Shares{0, 0, 90})) << name_of(policy);
    EXPECT_THROW(balancer.retire(2), InvalidArgument);
    EXPECT_THROW(balancer.retire(3), InvalidArgument);
    balancer.restore(1);
    EXPECT_EQ(balancer.next_plan(90).shares, (Shares{0, 45, 45})) << name_of(policy);
    balancer.restore(0);
    balancer.restore(0);
    EXPECT_EQ(balancer.next_plan(90).shares, (Shares{30, 30, 30})) << name_of(policy);
    EXPECT_THROW(balancer.restore(3), InvalidArgument);
  }
}

TEST(Balancer, ADeviceThatComesBackGetsWorkByWhatWasKnownOfIt) {
  Balancer balancer(three());
  Shares shares;
  const auto steps = [&](int count) {
    for (int k = 0; k < count; ++k) {
      shares = balancer.next_plan(900).shares;
      balancer.record(proportional(shares, {1.0, 2.0, 3.0}));
    }
  };
  steps(20);
  balancer.retire(2);
  steps(20);
  EXPECT_EQ(shares[2], 0);
  EXPECT_NEAR(static_cast<double>(shares[1]), 600.0, 6.0);
  balancer.restore(2);
  steps(1);
  EXPECT_NEAR(static_cast<double>(shares[2]), 450.0, 5.0) << balancer.explain();
}

/// Two equal devices that share a step's work perfectly, except that the second one starts late.
StepTimings with_late_second(const Shares& shares, double start_seconds) {
  StepTimings timings{.devices = {{}, {}}, .startup_seconds = {0.0, std::nullopt}};
  const double all = 0.001 * static_cast<double>(shares[0] + shares[1]);
  if (shares[1] > 0 && start_seconds >= all) {  // the first one ran the second one's share, too
    timings.devices[0].push_back({shares[0] + shares[1], all});
    timings.startup_seconds[1] = all;
    timings.step_seconds = all;
    return timings;
  }
  timings.devices[0].push_back({shares[0], 0.001 * static_cast<double>(shares[0])});
  timings.step_seconds = 0.001 * static_cast<double>(shares[0]);
  if (shares[1] > 0) {
    timings.devices[1].push_back({shares[1], 0.001 * static_cast<double>(shares[1])});
    timings.startup_seconds[1] = start_seconds;
    timings.step_seconds = std::max(timings.step_seconds, start_seconds + 0.001 * static_cast<double>(shares[1]));
  }
  return timings;
}

BalancerOptions two() {
  BalancerOptions options;
  for (int i = 0; i < 2; ++i) options.devices.push_back({"host:" + std::to_string(i), "host", {}});
  options.calibrate = false;
  return options;
}

TEST(Balancer, LeavesOutADeviceThatNeverComesInTimeAndTakesItBackWhenItDoes) {
  Balancer balancer(two());
  for (int k = 0; k < 16; ++k) balancer.record(with_late_second(balancer.next_plan(64).shares, 1.0));
  EXPECT_EQ(balancer.next_plan(64).shares, (Shares{64, 0})) << balancer.explain();
  EXPECT_NEAR(balancer.report().devices[1].startup_seconds, 0.064, 1e-9);
  EXPECT_TRUE(says(balancer.explain(), "after the first device"));
  int asked = 0;
  for (int k = 0; k < 1000; ++k) {
    const Shares shares = balancer.next_plan(64).shares;
    if (shares[1] > 0) ++asked;
    balancer.record(with_late_second(shares, 1.0));
  }
  EXPECT_GE(asked, 2);
  EXPECT_LE(asked, 20) << "a device that is always late is asked rarely";
  int back = 0;
  for (; back < 4000 && balancer.next_plan(64).shares[1] < 30; ++back) {
    balancer.record(with_late_second(balancer.next_plan(64).shares, 0.0));
  }
  EXPECT_LT(back, 4000) << balancer.explain();
}

TEST(Balancer, GivesADeviceThatStartsLateLess) {
  Balancer balancer(two());
  for (int k = 0; k < 60; ++k) balancer.record(with_late_second(balancer.next_plan(64).shares, 0.016));
  EXPECT_EQ(balancer.next_plan(64).shares, (Shares{40, 24})) << balancer.explain();
}

TEST(Balancer, RefusesStartsThatCannotBe) {
  Balancer balancer(two());
  balancer.next_plan(64);
  StepTimings timings{.devices = {{{32, 0.03}}, {{32, 0.03}}}, .startup_seconds = {0.0}};
  EXPECT_THROW(balancer.record(timings), InvalidArgument);
  timings.startup_seconds = {0.0, -1.0};
  EXPECT_THROW(balancer.record(timings), InvalidArgument);
  timings.startup_seconds = {0.0, std::nullopt};
  balancer.record(timings);
}

TEST(Balancer, ExplainsInWords) {
  Balancer balancer(three());
  EXPECT_TRUE(says(balancer.explain(), "Nothing is measured yet"));
  for (int k = 0; k < 20; ++k) balancer.record(proportional(balancer.next_plan(300).shares, {1.0, 1.0, 0.5}));
  const std::string text = balancer.explain();
  for (const char* part :
       {"host:2", "speed 0.50", "20 steps measured", "Move at step", "to make steps", "kept", "noise"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

TEST(Balancer, SaysThatFirstRunsTellNothing) {
  Balancer balancer(two());
  StepTimings timings = proportional(balancer.next_plan(64).shares, {1.0, 1.0});
  for (auto& device : timings.devices) {
    for (MicroBatchTiming& timing : device) timing.excluded = true;
  }
  balancer.record(timings);
  EXPECT_TRUE(says(balancer.explain(), "Only first runs of a size so far"));
}

TEST(Balancer, CountsOneStepAndOneMoveAsOne) {
  Balancer balancer(two());
  EXPECT_TRUE(says(balancer.explain(), "0 steps measured, 0 moves"));
  balancer.record(proportional(balancer.next_plan(64).shares, {1.0, 1.0}));
  EXPECT_TRUE(says(balancer.explain(), ", 1 step measured, 0 moves"));
  EXPECT_TRUE(says(balancer.explain(), ", 1 step of evidence,"));
  while (balancer.move_count() == 0 && balancer.report().steps < 60) {
    const bool late = balancer.report().steps > 20;
    balancer.record(proportional(balancer.next_plan(64).shares, {1.0, late ? 0.5 : 1.0}));
  }
  ASSERT_EQ(balancer.move_count(), 1);
  EXPECT_TRUE(says(balancer.explain(), " steps measured, 1 move"));
  EXPECT_EQ(balancer.explain().find("1 moves"), std::string::npos) << balancer.explain();
  for (int k = 0; balancer.move_count() < 4 && k < 600; ++k) {
    const bool late = k / 50 % 2 == 1;
    balancer.record(proportional(balancer.next_plan(64).shares, {1.0, late ? 0.5 : 1.0}));
  }
  ASSERT_EQ(balancer.move_count(), 4);
  EXPECT_TRUE(says(balancer.explain(), "The last 3 of 4 moves:\nMove at step"));
}

TEST(Balancer, TellsTheCausesItIsGivenBehindTheDevicesTheyAreOf) {
  Balancer balancer(three());
  balancer.record(proportional(balancer.next_plan(300).shares, {1.0, 1.0, 0.5}));
  const std::vector<std::string> causes{"", "", "it is hot"};
  const std::string text = balancer.explain(causes);
  const std::size_t line = text.find("  host:2: share");
  ASSERT_NE(line, std::string::npos) << text;
  EXPECT_EQ(text.find("\n    what may slow it: it is hot\n", line), text.find('\n', line)) << text;
  EXPECT_EQ(text.find("what may slow it"), text.rfind("what may slow it"));
  EXPECT_THROW(static_cast<void>(balancer.explain(std::span(causes).first(2))), InvalidArgument);
}

}  // namespace
}  // namespace paceline::balance

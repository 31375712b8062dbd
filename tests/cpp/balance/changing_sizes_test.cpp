// SPDX-License-Identifier: Apache-2.0
//
// Batch sizes that change from step to step: what is known of one size is not taken for another, nor lost by it.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

/// Devices of 4 ms and 0.1 ms an item, without noise.
sim::BoxOptions box_of(const std::vector<double>& speeds, double first_run_seconds = 0.0) {
  sim::BoxOptions box;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    sim::SimDevice device;
    device.name = "sim:" + std::to_string(i);
    device.speed = speeds[i];
    device.first_run_seconds = first_run_seconds;
    box.devices.push_back(device);
  }
  return box;
}

/// A balancer and the box that it plans for.
struct Trainer {
  explicit Trainer(const sim::BoxOptions& options) : box(options), balancer(options_for(options)) {}

  static BalancerOptions options_for(const sim::BoxOptions& box) {
    BalancerOptions options;
    for (const sim::SimDevice& device : box.devices) {
      options.devices.push_back({device.name, device.device_class, device.limits});
    }
    return options;
  }

  StepPlan step(std::int64_t batch_size) {
    const StepPlan plan = balancer.next_plan(batch_size);
    balancer.record(box.run(steps++, plan.shares).timings);
    return plan;
  }

  /// By the present step's speeds: how much longer than the best split it takes.
  [[nodiscard]] double lost(const Shares& shares, std::int64_t batch_size) const {
    return box.makespan(steps, shares) - box.ideal(steps, batch_size);
  }

  sim::Box box;
  Balancer balancer;
  std::int64_t steps = 0;
};

bool probes(const StepPlan& plan) { return plan.reason.starts_with("probe"); }

/// Two devices at full speed, and one that a batch of some hundred items does not pay for until step `until`.
sim::BoxOptions with_a_slow_third(std::int64_t until) {
  sim::BoxOptions box = box_of({1, 1, 1});
  box.throttles = {{2, 10.0, 0, until}};
  return box;
}

TEST(ChangingSizes, TakeADeviceBackAlthoughNoSizeComesAgain) {
  std::ostringstream ledger;
  Trainer trainer(with_a_slow_third(150));
  trainer.balancer.write_to(std::make_shared<LedgerWriter>(ledger));
  for (std::int64_t k = 0; k < 150; ++k) trainer.step(300 + k);
  EXPECT_EQ(trainer.step(450).shares[2], 0);
  for (std::int64_t k = 151; k < 400; ++k) trainer.step(300 + k);
  EXPECT_GT(trainer.step(299).shares[2], 90) << trainer.balancer.explain();
  std::istringstream in(ledger.str());
  const ReplayResult result = replay(in);
  EXPECT_EQ(result.records, 401);
  EXPECT_TRUE(result.mismatches.empty()) << result.mismatches.front().what;
}

TEST(ChangingSizes, AskADeviceThatStaysSlowRarely) {
  Trainer trainer(with_a_slow_third(100000));
  int asked = 0;
  for (std::int64_t k = 0; k < 3000; ++k) asked += probes(trainer.step(300 + (k * 7) % 331)) ? 1 : 0;
  EXPECT_GE(asked, 2);
  EXPECT_LE(asked, 10);
}

TEST(ChangingSizes, EachGoesBackToItsSplitAfterCalibration) {
  Trainer trainer(box_of({1, 1}));
  EXPECT_NE(trainer.step(400).shares, (Shares{200, 200}));
  trainer.step(96);
  const StepPlan plan = trainer.step(400);
  EXPECT_EQ(plan.shares, (Shares{200, 200})) << plan.reason;
  EXPECT_TRUE(trainer.balancer.report().recent_moves.empty()) << trainer.balancer.explain();
}

TEST(ChangingSizes, EachGoesBackToItsSplitAfterAProbe) {
  for (const bool fails : {false, true}) {
    Trainer trainer(with_a_slow_third(100000));
    Shares in_force;
    while (trainer.steps < 50) trainer.step(300);
    while (trainer.steps < 400 && !probes(trainer.balancer.next_plan(300))) in_force = trainer.step(300).shares;
    ASSERT_TRUE(probes(trainer.balancer.next_plan(300)));
    ASSERT_EQ(in_force[2], 0);
    const std::size_t moves = trainer.balancer.report().recent_moves.size();
    if (!fails) trainer.step(300);
    trainer.step(40);
    if (fails) {
      EXPECT_TRUE(probes(trainer.step(300))) << "the first time it did not answer";
    }
    const StepPlan plan = trainer.step(300);
    EXPECT_EQ(plan.shares, in_force) << plan.reason;
    EXPECT_EQ(trainer.balancer.report().recent_moves.size(), moves) << plan.reason;
  }
}

}  // namespace
}  // namespace paceline::balance

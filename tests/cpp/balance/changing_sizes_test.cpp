// SPDX-License-Identifier: Apache-2.0
//
// Batch sizes that change from step to step: the balancer neither mixes up what it knows of different sizes nor loses
// it.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>

#include "sim_box.hpp"

namespace paceline::balance {
namespace {

using testing::box_of;
using testing::options_for;
using Shares = std::vector<std::int64_t>;

/// A balancer and its simulated machine.
struct Trainer {
  explicit Trainer(const sim::BoxOptions& options) : box(options), balancer(options_for(options)) {}

  StepPlan step(std::int64_t batch_size) {
    const StepPlan plan = balancer.next_plan(batch_size);
    balancer.record(box.run(steps++, plan.shares).timings);
    return plan;
  }

  /// How much longer these shares take than the best split, by the present step's speeds.
  [[nodiscard]] double lost(const Shares& shares, std::int64_t batch_size) const {
    return box.makespan(steps, shares) - box.ideal(steps, batch_size);
  }

  sim::Box box;
  Balancer balancer;
  std::int64_t steps = 0;
};

bool probes(const StepPlan& plan) { return plan.reason.starts_with("probe"); }

/// Two devices at full speed, and a third that does not pay off for a batch of a few hundred items until step `until`.
sim::BoxOptions with_a_slow_third(std::int64_t until) {
  sim::BoxOptions box = box_of({1, 1, 1});
  box.throttles = {{2, 10.0, 0, until}};
  return box;
}

TEST(ChangingSizes, TakeADeviceBackAlthoughNoSizeComesAgain) {
  Trainer trainer(with_a_slow_third(150));
  for (std::int64_t k = 0; k < 150; ++k) trainer.step(300 + k);
  EXPECT_EQ(trainer.step(450).shares[2], 0);
  for (std::int64_t k = 151; k < 400; ++k) trainer.step(300 + k);
  EXPECT_GT(trainer.step(299).shares[2], 90) << trainer.balancer.explain();
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
  EXPECT_GT(trainer.balancer.report().moves, 0);
  EXPECT_EQ(trainer.balancer.explain().find("The last 0"), std::string::npos) << trainer.balancer.explain();
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

/// Alternates two sizes from step `from` on until `batch_size` moves. Returns what that size had lost by then.
double lost_until_moved(Trainer& trainer, std::int64_t batch_size, std::int64_t other_size) {
  const Shares in_force = trainer.step(batch_size).shares;
  double lost = 0.0;
  for (std::int64_t k = 0; k < 2000; ++k) {
    if (other_size > 0) trainer.step(other_size);
    const double loses = trainer.lost(in_force, batch_size);
    if (trainer.step(batch_size).shares != in_force) return lost;
    lost += loses;
  }
  return lost;
}

TEST(ChangingSizes, EachWaitsForItsOwnCostlyMove) {
  sim::BoxOptions options = box_of({1, 1}, 0.0, 0.5);
  options.throttles = {{1, 1.5, 20, 4000}};
  Trainer trainer(options);
  for (int k = 0; k < 10; ++k) {
    trainer.step(400);
    trainer.step(600);
  }
  EXPECT_NEAR(lost_until_moved(trainer, 400, 600), 0.5, 0.06) << trainer.balancer.explain();
}

TEST(ChangingSizes, WhatElseChangesForgetsNothingThatWasLost) {
  sim::BoxOptions options = box_of({1, 1, 1}, 0.0, 0.5);
  options.throttles = {{1, 1.5, 20, 4000}};
  for (std::int64_t step = 40; step < 2000; step += 40) options.throttles.push_back({2, 1.15, step, step + 20});
  Trainer trainer(options);
  for (int k = 0; k < 20; ++k) trainer.step(600);
  EXPECT_NEAR(lost_until_moved(trainer, 600, 0), 0.5, 0.15) << trainer.balancer.explain();
}

/// Device `device` becomes a fifth slower and then as fast as before, both too slowly for a change point.
void rise_and_fall(sim::BoxOptions& options, std::size_t device, std::int64_t from) {
  options.drifts.push_back({device, 1.0, 1.2, from, from + 200});
  options.drifts.push_back({device, 1.0, 1.0 / 1.2, from + 200, from + 400});
}

TEST(ChangingSizes, WhatOneMoveLostDoesNotPayForAnother) {
  const auto moves = [](double first_run_seconds, bool twice) {
    sim::BoxOptions options = box_of({1, 1}, 0.0, first_run_seconds);
    if (twice) rise_and_fall(options, 1, 50);
    rise_and_fall(options, 0, 800);
    Trainer trainer(options);
    while (trainer.steps < 1300) trainer.step(400);
    return trainer.balancer.report().recent_moves.size();
  };
  EXPECT_GT(moves(0.2, false), 0U);
  EXPECT_EQ(moves(0.6, false), 0U) << "all that is lost is less than a move costs";
  EXPECT_EQ(moves(0.6, true), 0U) << "neither of them lost as much";
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include "balance/lent_time.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/balance/what_if.hpp>
#include <paceline/plan/random.hpp>

#include "errors.hpp"

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

TEST(LentTime, IsTheMeanOfTheLastStepsWithItsStandardError) {
  LentTime lent(2);
  for (const double part : {0.1, 0.2, 0.12, 0.11}) lent.record(std::vector{part, 0.0}, {true, true});
  EXPECT_EQ(lent.part(0), 0.0) << "four steps are too few";
  lent.record(std::vector{0.07, 0.0}, {true, true});
  EXPECT_NEAR(lent.part(0), 0.12, 1e-12);
  EXPECT_NEAR(lent.error(0), std::sqrt(0.0094 / 20.0) / 0.88, 1e-12);  // squares of -0.02, 0.08, 0, -0.01, -0.05
  EXPECT_EQ(lent.part(1), 0.0);
  for (int k = 0; k < 16; ++k) lent.record(std::vector{0.2, 0.0}, {true, true});
  EXPECT_EQ(lent.part(0), 0.2) << "no more by rounding";
  EXPECT_EQ(lent.error(0), 0.0) << "it did not vary";
}

TEST(LentTime, OfALoadThatEndsIsForgottenInSixteenSteps) {
  LentTime lent(1);
  for (int k = 0; k < 20; ++k) lent.record(std::vector{0.1}, {true});
  double last = lent.part(0);
  for (int k = 0; k < 15; ++k) {
    lent.record({}, {true});
    EXPECT_LT(lent.part(0), last);
    last = lent.part(0);
  }
  lent.record({}, {true});
  EXPECT_EQ(lent.part(0), 0.0);
}

TEST(LentTime, OfADeviceWithoutWorkIsForgottenSoThatItIsMeasuredAgain) {
  LentTime lent(1);
  for (int k = 0; k < 16; ++k) lent.record(std::vector{k < 8 ? 0.2 : 0.4}, {true});
  lent.record(std::vector{0.9}, {false});
  EXPECT_NEAR(lent.part(0), (7 * 0.2 + 8 * 0.4) / 15, 1e-12) << "the oldest step goes, and nothing comes for it";
  for (int k = 0; k < 11; ++k) lent.record({}, {false});
  EXPECT_EQ(lent.part(0), 0.0);
  for (int k = 0; k < 20; ++k) lent.record({}, {false});
  for (int k = 0; k < 5; ++k) lent.record(std::vector{0.2}, {true});
  EXPECT_NEAR(lent.part(0), 0.2, 1e-12);
  lent.forget(0);
  EXPECT_EQ(lent.part(0), 0.0);
  lent.record(std::vector{0.2}, {true});
  EXPECT_EQ(lent.part(0), 0.0) << "none of the steps before counts";
}

TEST(LentTime, IsNoMoreThanItsErrorsWhereFewStepsLendAndNoneWhereAllLendLittle) {
  LentTime lent(2);
  for (int k = 0; k < 64; ++k) {
    lent.record(std::vector{k % 8 == 0 ? 0.1 : 0.0, 0.004}, {true, true});
    EXPECT_LE(lent.part(0), 2.0 * lent.error(0)) << k;
    EXPECT_EQ(lent.part(1), 0.0);
  }
}

TEST(LentTime, SlowsItemsAndLeavesADeviceThatLendsNothingAsItIsToTheBit) {
  LentTime lent(3);
  for (int k = 0; k < 9; ++k) lent.record(std::vector{0.0, 0.2, 1.0}, {true, true, true});
  const auto model = plan::CostModel::affine(0.3, 0.1);
  EXPECT_EQ(lent.slowed(0, model), model);
  EXPECT_NEAR(lent.slowed(1, model).seconds(7), model.seconds(7) / 0.8, 1e-12);
  EXPECT_NEAR(lent.slowed(2, model).seconds(7), model.seconds(7) / 0.1, 1e-12) << "not more than nine tenths";
}

/// Devices that lend: each works for so many seconds per item, and other work comes all the time.
struct Lenders {
  std::vector<double> per_item;
  std::vector<double> rate;         // jobs per second of the device's time in the step
  double job_seconds = 0.0;         // 0: the rate is the part itself, without jobs that could be counted
  double overhead_seconds = 0.002;  // of a share
  double most = 1.0;                // what is told of a device's time, at most
  double chance = 0.0;              // above 0: a job comes in so many of the steps, and no other; 2: in every other one
  std::uint64_t seed = 1;

  [[nodiscard]] double own(std::size_t i, std::int64_t items) const {
    return items > 0 ? overhead_seconds + per_item[i] * static_cast<double>(items) : 0.0;
  }
  /// From the start to the end of the device's share, in that step.
  [[nodiscard]] double wall(std::int64_t step, std::size_t i, std::int64_t items) const {
    const double work = own(i, items);
    if (chance > 0.0) {
      const bool comes =
          chance > 1.0 ? step % 2 == 0 : plan::Random(seed, static_cast<std::uint64_t>(step), i).uniform() < chance;
      return rate[i] > 0.0 && comes ? work + job_seconds : work;
    }
    if (job_seconds == 0.0) return work / (1.0 - rate[i]);
    if (rate[i] <= 0.0) return work;
    plan::Random random(seed, static_cast<std::uint64_t>(step), i);
    double end = work;
    for (double at = -std::log1p(-random.uniform()) / rate[i]; at < end;
         at += -std::log1p(-random.uniform()) / rate[i]) {
      end += job_seconds;
    }
    return end;
  }
  [[nodiscard]] double makespan(std::int64_t step, const Shares& shares) const {
    double longest = 0.0;
    for (std::size_t i = 0; i < shares.size(); ++i) longest = std::max(longest, wall(step, i, shares[i]));
    return longest;
  }
  /// What the engine measures of a step. `tell`: with the lent time.
  [[nodiscard]] StepTimings run(std::int64_t step, const Shares& shares, bool tell = true) const {
    StepTimings timings{.devices = {}, .step_seconds = makespan(step, shares)};
    for (std::size_t i = 0; i < shares.size(); ++i) {
      auto& runs = timings.devices.emplace_back();
      if (shares[i] > 0) runs.push_back({shares[i], own(i, shares[i])});
      const double part = shares[i] > 0 ? 1.0 - own(i, shares[i]) / wall(step, i, shares[i]) : 0.0;
      if (tell) timings.lent_parts.push_back(std::min(part, most));
    }
    return timings;
  }
};

Balancer balancer_of(std::size_t devices, Balance policy = Balance::automatic) {
  BalancerOptions options;
  options.policy = policy;
  for (std::size_t i = 0; i < devices; ++i) options.devices.push_back({"host:" + std::to_string(i), "host", {}});
  return Balancer(std::move(options));
}

Shares run(Balancer& balancer, const Lenders& lenders, std::int64_t from, std::int64_t steps, std::int64_t batch,
           bool tell = true) {
  for (std::int64_t k = from; k < from + steps; ++k) {
    balancer.record(lenders.run(k, balancer.next_plan(batch).shares, tell));
  }
  return balancer.next_plan(batch).shares;
}

/// The shortest step of all splits.
double best(const Lenders& lenders, std::int64_t batch, Shares& shares, std::size_t from = 0) {
  if (from + 1 == shares.size()) {
    shares[from] = batch;
    return lenders.makespan(0, shares);
  }
  double least = std::numeric_limits<double>::max();
  for (shares[from] = 0; shares[from] <= batch; ++shares[from]) {
    least = std::min(least, best(lenders, batch - shares[from], shares, from + 1));
  }
  return least;
}

TEST(LentTimeInPlans, GivesTheBestOfAllSplitsWithinWhatAMoveMustPromise) {
  const std::vector<Lenders> boxes{
      {.per_item = {1e-3, 1e-3}, .rate = {0.1, 0.0}},
      {.per_item = {1e-3, 2e-3}, .rate = {0.3, 0.1}},
      {.per_item = {1e-3, 1e-3, 1e-3}, .rate = {0.0, 0.1, 0.05}},
      {.per_item = {1e-3, 3e-3, 2e-3}, .rate = {0.25, 0.0, 0.1}},
  };
  for (std::size_t k = 0; k < boxes.size(); ++k) {
    const std::int64_t batch = 240;
    Shares any(boxes[k].per_item.size());
    const double ideal = best(boxes[k], batch, any);
    Balancer balancer = balancer_of(any.size());
    EXPECT_LE(boxes[k].makespan(0, run(balancer, boxes[k], 0, 60, batch)), 1.01 * ideal) << k;
    Balancer blind = balancer_of(any.size());
    EXPECT_GT(boxes[k].makespan(0, run(blind, boxes[k], 0, 60, batch, false)), 1.025 * ideal) << k;
  }
}

/// What comes of requests at random, in the steps after the first ones.
struct Outcome {
  int moves = 0;
  std::int64_t taken_back = 0;
  int turns = 0;         // how often the device begins or ceases to lend
  double planned = 0.0;  // seconds
  double best = 0.0;     // of the fixed splits
  double even = 0.0;
};

Outcome outcome_of(const Lenders& lenders) {
  constexpr std::int64_t kBatch = 200;
  constexpr std::int64_t kSteps = 400;
  constexpr std::int64_t kFirst = 40;
  std::vector<double> fixed(kBatch + 1);
  Balancer balancer = balancer_of(2);
  Outcome outcome;
  Shares last;
  bool lent = false;
  for (std::int64_t k = 0; k < kSteps; ++k) {
    const Shares shares = balancer.next_plan(kBatch).shares;
    balancer.record(lenders.run(k, shares));
    const bool moved = std::exchange(last, shares) != shares;
    const bool lends = balancer.report().devices[1].lent_part > 0.0;
    const bool turned = std::exchange(lent, lends) != lends;
    if (k < kFirst) continue;
    outcome.moves += moved ? 1 : 0;
    outcome.turns += turned ? 1 : 0;
    outcome.planned += lenders.makespan(k, shares);
    for (std::int64_t n = 0; n <= kBatch; ++n) {
      fixed[static_cast<std::size_t>(n)] += lenders.makespan(k, {n, kBatch - n});
    }
  }
  outcome.best = *std::ranges::min_element(fixed);
  outcome.taken_back = balancer.report().taken_back;
  outcome.even = fixed[kBatch / 2];
  return outcome;
}

TEST(LentTimeInPlans, StaysAndIsAsGoodAsTheBestFixedSplitWhenRequestsComeAtRandom) {
  const Lenders box{.per_item = {1e-3, 1e-3}, .rate = {0.0, 1.0}, .overhead_seconds = 0.0, .most = 0.1};
  std::vector<Lenders> loads;
  for (const double rate : {2.5, 7.0, 10.0, 20.0, 100.0}) {
    loads.push_back(box);
    loads.back().rate[1] = rate;
    loads.back().job_seconds = 0.1 / rate;
  }
  for (const double chance : {0.3, 0.4, 0.5, 0.6, 2.0}) {
    loads.push_back(box);
    loads.back().chance = chance;
    loads.back().job_seconds = 0.01;
  }
  for (Lenders& load : loads) {
    for (load.seed = 1; load.seed <= 3; ++load.seed) {
      const Outcome outcome = outcome_of(load);
      SCOPED_TRACE(::testing::Message() << load.rate[1] << " jobs a second, in " << load.chance
                                        << " of the steps, seed " << load.seed);
      EXPECT_LE(outcome.planned, 1.01 * outcome.best);
      EXPECT_LE(outcome.moves, 15);
      EXPECT_EQ(outcome.taken_back, 0);
      EXPECT_LE(outcome.turns, 15);
      if (load.rate[1] >= 20.0) {
        EXPECT_GT(outcome.even, 1.02 * outcome.best) << "the even split, which counts nothing";
      }
    }
  }
}

TEST(LentTimeInPlans, IsForgottenAFewStepsAfterTheLoadHasStopped) {
  const Lenders busy{.per_item = {1e-3, 1e-3}, .rate = {0.0, 0.1}};
  const Lenders quiet{.per_item = {1e-3, 1e-3}, .rate = {0.0, 0.0}};
  Balancer balancer = balancer_of(2);
  EXPECT_EQ(run(balancer, quiet, 0, 60, 200), (Shares{100, 100}));
  EXPECT_EQ(run(balancer, busy, 60, 8, 200), (Shares{105, 95}));
  EXPECT_LE(run(balancer, quiet, 68, 16, 200)[0], 101) << "but for less than a move must promise";
  EXPECT_EQ(balancer.report().devices[1].lent_part, 0.0);
  EXPECT_EQ(run(balancer, busy, 84, 8, 200), (Shares{105, 95})) << "as quickly again";
  EXPECT_EQ(run(balancer, busy, 92, 60, 200), (Shares{105, 95})) << "longer steps are not the move's fault";
  EXPECT_EQ(balancer.report().taken_back, 0);
}

TEST(LentTimeInPlans, MovesForMoreThanTheThresholdOnly) {
  const Lenders lenders{.per_item = {1e-3, 1e-3}, .rate = {0.0, 0.015}};  // a move gains 0.75 %
  Balancer balancer = balancer_of(2);
  EXPECT_EQ(run(balancer, lenders, 0, 60, 200), (Shares{100, 100}));
  EXPECT_NEAR(balancer.report().devices[1].lent_part, 0.015, 1e-9);
}

TEST(LentTimeInPlans, OfADeviceThatIsRetiredOrAddedIsNone) {
  const Lenders lenders{.per_item = {1e-3, 1e-3, 1e-3}, .rate = {0.0, 0.3, 0.0}};
  Balancer balancer = balancer_of(3);
  run(balancer, lenders, 0, 60, 240);
  WhatIfOptions more;
  more.add = {{.name = "another", .like = 1}};
  const Shares with = balancer.what_if(more).shares;
  EXPECT_EQ(with[3], with[0]) << "no requests come to a device that is not there";
  EXPECT_LT(with[1], with[0]);
  balancer.retire(1);
  EXPECT_EQ(balancer.report().devices[1].lent_part, 0.0);
  EXPECT_EQ(balancer.explain().find("lends"), std::string::npos);
  run(balancer, lenders, 60, 4, 240);
  balancer.restore(1);
  EXPECT_EQ(balancer.report().devices[1].lent_part, 0.0);
  run(balancer, lenders, 64, 20, 240);
  EXPECT_NEAR(balancer.report().devices[1].lent_part, 0.3, 1e-9);
}

TEST(LentTimeInPlans, DoesNotChangeFixedRatios) {
  const Lenders lenders{.per_item = {1e-3, 1e-3}, .rate = {0.0, 0.3}};
  Balancer balancer = balancer_of(2, Balance::even);
  EXPECT_EQ(run(balancer, lenders, 0, 20, 200), (Shares{100, 100}));
  const std::string text = balancer.explain();
  EXPECT_NE(text.find("host:1 lends 30 % of its time to requests\n"), std::string::npos) << text;
}

TEST(LentTimeInPlans, IsInTheExplanationTheReportAndTheLedger) {
  const Lenders lenders{.per_item = {1e-3, 1e-3}, .rate = {0.0, 0.0909}};
  Balancer balancer = balancer_of(2);
  std::ostringstream ledger;
  balancer.write_to(std::make_shared<LedgerWriter>(ledger));
  run(balancer, lenders, 0, 4, 200);
  EXPECT_EQ(balancer.explain().find("lends"), std::string::npos);
  run(balancer, lenders, 4, 8, 200);
  const std::string text = balancer.explain();
  EXPECT_NE(text.find("host:1 lends 9 % of its time to requests, which its share counts\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("host:0 lends"), std::string::npos) << text;
  EXPECT_EQ(balancer.report().devices[0].lent_part, 0.0);
  EXPECT_NEAR(balancer.report().devices[1].lent_part, 0.0909, 1e-9);
  EXPECT_NE(ledger.str().find(R"("lent_parts": [0, 0.0)"), std::string::npos) << ledger.str();
}

TEST(LentTimeInPlans, RefusesPartsThatAreNone) {
  Balancer balancer = balancer_of(2);
  const StepPlan plan = balancer.next_plan(4);
  StepTimings timings{.devices = {{{2, 1.0}}, {{2, 1.0}}}};
  timings.lent_parts = {0.0};
  EXPECT_TRUE(says(message_of([&] { balancer.record(timings); }), "lent_parts of 1 devices for a balancer of 2"));
  timings.lent_parts = {0.0, 1.5};
  EXPECT_TRUE(says(message_of([&] { balancer.record(timings); }), "host:1 reports that it lent 1.5"));
  timings.lent_parts = {0.0, 1.0};
  balancer.record(timings);
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/corrections.hpp>
#include <paceline/plan/hold_back.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::plan {
namespace {

const CostModel kModel = CostModel::affine(1e-3, 1e-4);

TEST(HoldBack, HoldsNothingBackOnAQuietMachine) {
  const std::vector<std::int64_t> shares{256, 256};
  const HoldBackPlan plan = plan_hold_back(shares, std::vector(2, kModel), std::vector(2, 0.005));
  EXPECT_EQ(plan.first_chunks, shares);
  EXPECT_EQ(plan.pool, 0);
}

TEST(HoldBack, HoldsBackMoreTheMoreADeviceVaries) {
  const std::vector<std::int64_t> shares{340, 172};
  const HoldBackPlan plan = plan_hold_back(shares, std::vector{kModel, kModel.scaled(2.0)}, std::vector{0.02, 0.16});
  EXPECT_GT(plan.pool, 0);
  EXPECT_GT(172 - plan.first_chunks[1], 2 * (340 - plan.first_chunks[0]));
}

TEST(HoldBack, HoldsNothingBackWhereACorrectionCostsMoreThanItRecovers) {
  const std::vector<std::int64_t> shares{256, 256};
  const std::vector models(2, CostModel::affine(1e-3, 1e-4));  // shares of 26.6 ms
  const auto pool = [&](double noise) { return plan_hold_back(shares, models, std::vector(2, noise)).pool; };
  // Two normal finishes with deviation s: the later one is s / sqrt(pi) after their mean.
  const double even_odds = 1e-3 * std::sqrt(std::numbers::pi) / models[0].seconds(256);
  EXPECT_EQ(pool(0.99 * even_odds), 0);
  EXPECT_GT(pool(1.01 * even_odds), 0);
}

TEST(HoldBack, HoldsNothingBackBeforeAnythingIsMeasuredOrForASingleDevice) {
  const std::vector<std::int64_t> shares{5, 0, 6};
  EXPECT_EQ(plan_hold_back(shares, {}, {}).first_chunks, shares);
  const std::vector<std::int64_t> one{0, 512};
  EXPECT_EQ(plan_hold_back(one, std::vector(2, kModel), std::vector(2, 0.3)).pool, 0);
}

TEST(HoldBack, KeepsEveryItemAndTheGranularityOfWhatIsHeldBack) {
  std::mt19937_64 rng(3);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t count = 1 + rng() % 6;
    const std::int64_t granularity = 1 + static_cast<std::int64_t>(rng() % 8);
    std::vector<std::int64_t> shares(count);
    std::vector<CostModel> models;
    std::vector<double> noise(count);
    for (std::size_t d = 0; d < count; ++d) {
      shares[d] = static_cast<std::int64_t>(rng() % 300);
      noise[d] = static_cast<double>(rng() % 300) / 1000.0;
      models.push_back(CostModel::affine(static_cast<double>(rng() % 100) * 1e-5, 1e-4));
    }
    const HoldBackPlan plan = plan_hold_back(shares, models, noise, granularity);
    std::int64_t pool = 0;
    for (std::size_t d = 0; d < count; ++d) {
      const std::int64_t held = shares[d] - plan.first_chunks[d];
      EXPECT_GE(plan.first_chunks[d], 0);
      EXPECT_GE(held, 0);
      EXPECT_EQ(held % granularity, 0);
      pool += held;
    }
    EXPECT_EQ(pool, plan.pool);
  }
}

using Claim =
    std::function<std::int64_t(std::int64_t remaining, const std::vector<TailDevice>& devices, std::int64_t claimer)>;

struct Outcome {
  double makespan = 0.0;
  std::int64_t left = 0;
  double longest_chunk = 0.0;
  std::set<std::int64_t> sizes;
};

// The tail of a step on a virtual clock. The device that is free first claims next. After a claim of 0 it does not
// claim again.
Outcome run_tail(std::vector<TailDevice> devices, std::int64_t remaining, const std::vector<double>& slowdown,
                 const Claim& claim) {
  Outcome outcome;
  for (const TailDevice& device : devices) outcome.makespan = std::max(outcome.makespan, device.free_at_seconds);
  while (remaining > 0) {
    std::size_t next = devices.size();
    for (std::size_t i = 0; i < devices.size(); ++i) {
      if (devices[i].may_claim &&
          (next == devices.size() || devices[i].free_at_seconds < devices[next].free_at_seconds))
        next = i;
    }
    if (next == devices.size()) break;
    const std::int64_t taken = claim(remaining, devices, static_cast<std::int64_t>(next));
    if (taken == 0) {
      devices[next].may_claim = false;
      continue;
    }
    EXPECT_LE(taken, remaining);
    const double seconds = devices[next].model.seconds(taken) * slowdown[next];
    devices[next].free_at_seconds += seconds;
    outcome.longest_chunk = std::max(outcome.longest_chunk, seconds);
    outcome.makespan = std::max(outcome.makespan, devices[next].free_at_seconds);
    outcome.sizes.insert(taken);
    remaining -= taken;
  }
  outcome.left = remaining;
  return outcome;
}

struct Tail {
  std::vector<TailDevice> devices;
  std::vector<double> slowdown;  // true time / modelled time, unknown to the planner
  std::int64_t remaining = 0;
  std::int64_t floor = 1;

  // The smallest makespan with one last chunk per device, by the true costs.
  [[nodiscard]] double ideal() const {
    std::vector<CostModel> models;
    SplitOptions options;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      models.push_back(devices[i].model.scaled(slowdown[i]));
      options.limits.push_back({.startup_seconds = devices[i].free_at_seconds});
    }
    double latest_start = 0.0;
    for (const TailDevice& device : devices) latest_start = std::max(latest_start, device.free_at_seconds);
    return std::max(latest_start, split_batch(remaining, models, options).makespan_seconds);
  }
};

Tail random_tail(std::mt19937_64& random, double error) {
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  Tail tail;
  tail.floor = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 2 + random() % 7; i > 0; --i) {
    const CostModel model = CostModel::affine(uniform(0.5e-3, 4e-3), uniform(0.05e-3, 0.4e-3));
    tail.devices.push_back({.model = model, .free_at_seconds = uniform(0.0, 5e-3)});
    tail.slowdown.push_back(uniform(1.0 - error, 1.0 + error));
    tail.floor = std::min(tail.floor, correction_floor(model));
  }
  tail.remaining = 1 + static_cast<std::int64_t>(random() % 1000);
  return tail;
}

Claim corrections(std::int64_t floor, std::int64_t granularity = 1) {
  return [=](std::int64_t remaining, const std::vector<TailDevice>& devices, std::int64_t claimer) {
    return next_correction(remaining, devices, claimer, floor, granularity);
  };
}

Claim uniform_chunks(std::int64_t size) {
  return
      [=](std::int64_t remaining, const std::vector<TailDevice>&, std::int64_t) { return std::min(remaining, size); };
}

TEST(Corrections, HandOutEverythingInFewSizes) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const Tail tail = random_tail(random, 0.5);
    const std::int64_t granularity = 1 + static_cast<std::int64_t>(random() % 16);
    const Outcome outcome = run_tail(tail.devices, tail.remaining, tail.slowdown, corrections(tail.floor, granularity));
    ASSERT_EQ(outcome.left, 0);
    const std::int64_t unit = (tail.floor + granularity - 1) / granularity * granularity;
    std::int64_t largest_floor = unit;
    for (const TailDevice& device : tail.devices) {
      largest_floor = std::max(largest_floor, correction_floor(device.model, kCorrectionOverhead, granularity));
    }
    for (const std::int64_t size : outcome.sizes) {
      const bool doubled = size % unit == 0 && std::has_single_bit(static_cast<std::uint64_t>(size / unit));
      ASSERT_TRUE(doubled || size < 4 * largest_floor) << size << " of unit " << unit << ", floor " << largest_floor;
    }
  }
}

TEST(Corrections, FinishTogetherNearTheIdealAndBeforeUniformChunks) {
  std::mt19937_64 random(2);
  double loss = 0.0;
  double uniform = 0.0;
  double worst = 0.0;
  constexpr int rounds = 1000;
  for (int round = 0; round < rounds; ++round) {
    const Tail tail = random_tail(random, 0.1);
    const double ideal = tail.ideal();
    const double ours = run_tail(tail.devices, tail.remaining, tail.slowdown, corrections(tail.floor)).makespan;
    const double chunks = run_tail(tail.devices, tail.remaining, tail.slowdown, uniform_chunks(tail.floor)).makespan;
    ASSERT_LE(ours, chunks * 1.05);
    loss += ours / ideal - 1.0;
    uniform += chunks / ideal - 1.0;
    worst = std::max(worst, ours / ideal - 1.0);
  }
  // The ideal knows the true speeds, which the models miss by 10 %, and pays each fixed cost once. Here each claim pays
  // it.
  EXPECT_LT(loss / rounds, 0.20);
  EXPECT_LT(worst, 0.40);
  EXPECT_LT(loss / rounds, uniform / rounds - 0.2) << "small chunks, each of which has a fixed cost";
}

// Like a step: a planned chunk of most of the share, by wrong models, then corrections.
TEST(Corrections, MakeGoodMostOfWhatAPlanLosesThatIsWrongAboutSpeeds) {
  std::mt19937_64 random(4);
  double planned_loss = 0.0;
  double corrected_loss = 0.0;
  constexpr int rounds = 1000;
  for (int round = 0; round < rounds; ++round) {
    Tail step = random_tail(random, 0.25);
    step.remaining = 6000;  // a step of a few hundred milliseconds, with fixed costs of 0.5 to 4
    std::vector<CostModel> models;
    for (TailDevice& device : step.devices) {
      device.free_at_seconds = 0.0;
      models.push_back(device.model);
    }
    const double ideal = step.ideal();
    const Split plan = split_batch(step.remaining, models);
    double planned = 0.0;
    std::vector<TailDevice> devices = step.devices;
    std::int64_t pool = 0;
    for (std::size_t i = 0; i < models.size(); ++i) {
      if (plan.shares[i] == 0) continue;
      planned = std::max(planned, models[i].seconds(plan.shares[i]) * step.slowdown[i]);
      const std::int64_t first = plan.shares[i] * 7 / 10;
      devices[i].free_at_seconds = models[i].seconds(first) * step.slowdown[i];
      pool += plan.shares[i] - first;
    }
    planned_loss += planned / ideal - 1.0;
    corrected_loss += run_tail(devices, pool, step.slowdown, corrections(step.floor)).makespan / ideal - 1.0;
  }
  EXPECT_GT(planned_loss / rounds, 0.15);
  EXPECT_LT(corrected_loss, 0.4 * planned_loss);
}

TEST(Corrections, DoNotHalveBelowWhatPaysForTheClaimersOwnFixedCost) {
  const std::vector<TailDevice> devices(2, {.model = CostModel::affine(30.0, 1.0)});
  EXPECT_EQ(correction_floor(devices[0].model), 90);
  EXPECT_EQ(next_correction(716, devices, 0, 4), 358);
  EXPECT_EQ(next_correction(720, devices, 0, 4), 128);
}

TEST(Corrections, LeaveTheRestToDevicesThatFinishItSooner) {
  const std::vector<TailDevice> devices{{.model = CostModel::affine(50.0, 1.0)},
                                        {.model = CostModel::affine(0.0, 1.0)}};
  EXPECT_EQ(next_correction(8, devices, 0, 1), 0);
  EXPECT_EQ(next_correction(8, devices, 1, 4), 8);
}

TEST(Corrections, CountOnlyDevicesThatMayClaim) {
  std::vector<TailDevice> devices(2, {.model = CostModel::affine(0.0, 1.0)});
  EXPECT_EQ(next_correction(8, devices, 0, 8), 4);
  devices[1].may_claim = false;
  EXPECT_EQ(next_correction(8, devices, 0, 8), 8);
  EXPECT_EQ(next_correction(8, devices, 1, 8), 0);
}

TEST(Corrections, TakeHalfOfTheirPartWhileThatIsLarge) {
  const std::vector<TailDevice> devices(2, {.model = CostModel::affine(0.0, 1.0)});
  EXPECT_EQ(next_correction(100, devices, 0, 3), 24);  // part 50, half 25, the largest 3 * 2^k below it is 24
  EXPECT_EQ(next_correction(20, devices, 0, 3), 10);   // half of 10 is less than two floors
}

TEST(Corrections, DoNotDependOnWhereTheClockStarts) {
  std::vector<TailDevice> devices{{.model = CostModel::affine(1.0, 0.5), .free_at_seconds = -8.0},
                                  {.model = CostModel::affine(2.0, 0.25), .free_at_seconds = -4.0}};
  const std::int64_t before = next_correction(64, devices, 1, 2);
  for (TailDevice& device : devices) device.free_at_seconds += 1024.0;
  EXPECT_EQ(next_correction(64, devices, 1, 2), before);
}

TEST(Corrections, RefuseAClaimerThatIsNotThere) {
  const std::vector<TailDevice> devices(2);
  EXPECT_THROW((void)next_correction(8, devices, 2, 1), InvalidArgument);
  EXPECT_THROW((void)next_correction(-1, devices, 0, 1), InvalidArgument);
  EXPECT_THROW((void)next_correction(8, devices, 0, 0), InvalidArgument);
  EXPECT_EQ(next_correction(0, devices, 0, 1), 0);
}

TEST(FittingPiece, LeavesNothingBelowTheLeastAndIsTheNearestToWhatIsWanted) {
  for (std::int64_t left = 1; left <= 20; ++left) {
    for (std::int64_t least = 1; least <= 4; ++least) {
      for (std::int64_t wanted = 0; wanted <= 22; ++wanted) {
        const std::int64_t size = fitting_piece(wanted, left, least);
        SCOPED_TRACE(::testing::Message() << wanted << " of " << left << ", least " << least);
        ASSERT_GE(size, std::min(left, least));
        ASSERT_TRUE(size == left || left - size >= least);
        if (wanted >= left) {
          EXPECT_EQ(size, left);
          continue;
        }
        for (std::int64_t other = least; other <= left - least; ++other) {
          EXPECT_LE(std::abs(size - wanted), std::abs(other - wanted));
        }
      }
    }
  }
}

TEST(CorrectionFloor, IsTheFirstSizeWhoseFixedCostIsWorthIt) {
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 0.5), 8);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 0.2), 32);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 0.5, 6), 12);
  EXPECT_EQ(correction_floor(CostModel::affine(0.0, 0.5)), 1);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.5), 1.0), 1);
}

TEST(CorrectionFloor, IsOutOfReachWhereTimeDoesNotGrow) {
  EXPECT_GT(correction_floor(CostModel::affine(4.0, 0.0)), std::int64_t{1} << 61);
  EXPECT_EQ(correction_floor(CostModel::affine(4.0, 0.0), 0.5, 1000) % 1000, 0);
}

TEST(CorrectionFloor, RefusesAnOverheadThatIsNoPart) {
  EXPECT_THROW((void)correction_floor(CostModel(), 0.0), InvalidArgument);
  EXPECT_THROW((void)correction_floor(CostModel(), 1.5), InvalidArgument);
  EXPECT_THROW((void)correction_floor(CostModel(), 0.5, 0), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan

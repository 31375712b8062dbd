// SPDX-License-Identifier: Apache-2.0
#include "balance/noise_memory.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include <paceline/sim/random.hpp>

namespace paceline::balance {
namespace {

/// Feeds `steps` residuals of two devices: independent noise, and equally large noise that lasts `lasts` steps (0:
/// none).
void feed(NoiseMemory& memory, int steps, double lasts, std::uint64_t seed = 1, double slope = 0.0) {
  const double kept = lasts > 0.0 ? std::exp(-1.0 / lasts) : 0.0;
  double lasting[2] = {0.0, 0.0};
  for (int k = 0; k < steps; ++k) {
    for (std::size_t i = 0; i < 2; ++i) {
      sim::Random random(seed, static_cast<std::uint64_t>(k), i);
      lasting[i] = kept * lasting[i] + 0.05 * std::sqrt(1.0 - kept * kept) * random.normal();
      memory.add(i, 0.05 * random.normal() + lasting[i] + slope * k);
    }
  }
}

TEST(NoiseMemory, FindsIndependentNoiseIndependent) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    NoiseMemory memory(2);
    feed(memory, 500, 0.0, seed);
    EXPECT_LE(memory.variance_factor(100), 1.35) << seed;
  }
}

TEST(NoiseMemory, MeasuresHowMuchLessAMeanKnows) {
  // Half of the variance has the correlations phi^j: 1 + phi / (1 - phi), minus the part beyond a finite sum.
  const double phi = std::exp(-1.0 / 4.0);
  double sum = 0.0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    NoiseMemory memory(2);
    feed(memory, 2000, 4.0, seed);
    sum += memory.variance_factor(1000) / 20.0;
  }
  EXPECT_NEAR(sum, 1.0 + phi / (1.0 - phi), 0.8);
}

TEST(NoiseMemory, FewSamplesAreLessAlikeThanMany) {
  NoiseMemory memory(2);
  feed(memory, 1000, 4.0);
  EXPECT_EQ(memory.variance_factor(1), 1.0);
  EXPECT_LT(memory.variance_factor(2), 1.6);
  EXPECT_LT(memory.variance_factor(8), memory.variance_factor(64));
}

TEST(NoiseMemory, BeforeAnythingIsMeasuredNoiseLastsAsItDoesOnRealCores) {
  const NoiseMemory memory(2);
  EXPECT_GT(memory.variance_factor(100), 2.5);
  EXPECT_LT(memory.variance_factor(100), 4.5);
}

TEST(NoiseMemory, ASlowDriftIsNoNoise) {
  NoiseMemory memory(2);
  feed(memory, 500, 0.0, 1, 0.0005);
  EXPECT_LE(memory.variance_factor(100), 1.35);
}

TEST(NoiseMemory, ForgetsAChangeOfSpeedWhereItIsTold) {
  NoiseMemory restarted(1);
  NoiseMemory untold(1);
  for (int k = 0; k < 1000; ++k) {
    if (k % 50 == 0) restarted.restart(0);
    const double residual = 0.01 * sim::Random(1, static_cast<std::uint64_t>(k), 0).normal() + 0.05 * (k / 50 % 2);
    restarted.add(0, residual);
    untold.add(0, residual);
  }
  EXPECT_LE(restarted.variance_factor(100), 1.35);
  EXPECT_GT(untold.variance_factor(100), 5.0);
}

}  // namespace
}  // namespace paceline::balance

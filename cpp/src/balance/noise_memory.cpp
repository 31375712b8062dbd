// SPDX-License-Identifier: Apache-2.0
#include "balance/noise_memory.hpp"

#include <algorithm>

#include "balance/bounded.hpp"

namespace paceline::balance {
namespace {

// Until the noise is measured, its correlations are those of two quiet cores, 0.36 and 0.27 at lags 1 and 2. Without
// this prior the first steps would be believed most, although their noise is known least.
constexpr double kPrior = 32.0;  // differences that this weighs against
constexpr double kPriorFirst = 0.36;
constexpr double kPriorDecay = 0.76;
constexpr double kLeastPair = 0.1;  // a sum of two neighbours below comes from a slow drift or from chance
constexpr double kMemory = 4096.0;  // differences of each lag, all devices together: then old ones count half

}  // namespace

void NoiseMemory::add(std::size_t device, double residual) {
  std::vector<double>& recent = recent_[device];
  for (std::size_t j = 0; j < recent.size(); ++j) {
    const double difference = residual - recent[recent.size() - 1 - j];
    lags_[j].squares += 0.5 * difference * difference;
    lags_[j].count += 1.0;
  }
  keep_last(recent, residual, kFar);
  if (lags_[0].count >= kMemory) {
    for (Lag& lag : lags_) {
      lag.squares *= 0.5;
      lag.count *= 0.5;
    }
  }
  stale_ = true;
}

void NoiseMemory::correlate() const {
  stale_ = false;
  correlations_.fill(0.0);
  Lag far;
  for (std::size_t j = kLags; j < kFar; ++j) {
    far.squares += lags_[j].squares;
    far.count += lags_[j].count;
  }
  const double variance = far.squares / std::max(far.count, 1.0);
  const double known = far.count / static_cast<double>(kFar - kLags);
  double prior = kPriorFirst / kPriorDecay;
  const auto correlation = [&](std::size_t j) {  // of each lag in turn
    prior *= kPriorDecay;
    if (variance <= 0.0) return prior;
    const double measured = 1.0 - lags_[j].squares / lags_[j].count / variance;
    return (known * measured + kPrior * prior) / (known + kPrior);
  };
  for (std::size_t j = 0; j + 1 < kLags; j += 2) {
    const double first = correlation(j);
    const double second = correlation(j + 1);
    if (first + second < kLeastPair) return;
    correlations_[j] = first;
    correlations_[j + 1] = second;
  }
}

double NoiseMemory::variance_factor(std::size_t samples) const {
  if (stale_) correlate();
  double factor = 1.0;
  const auto n = static_cast<double>(samples);
  for (std::size_t j = 1; j < std::min(samples, kLags + 1); ++j) {
    factor += 2.0 * (1.0 - static_cast<double>(j) / n) * correlations_[j - 1];
  }
  return std::max(1.0, factor);
}

}  // namespace paceline::balance

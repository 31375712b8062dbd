// SPDX-License-Identifier: Apache-2.0
#include "balance/target.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "balance/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::array<double, 2> kCaution{0.5, 1.0};  // parts of the newsvendor's quantile that are tried beside 0
constexpr int kIntegrationSteps = 64;
constexpr double kTail = 4.0;  // standard errors beyond which nothing is expected

double error_with(const PolicyContext& context, std::size_t device, std::int64_t items) {
  return context.estimator.error_at(device, static_cast<double>(std::max<std::int64_t>(items, 1)));
}

/// E[max_c T_c (1 + u_c Z_c)] over clusters c, by the trapezoidal sum of 1 - F.
double expected_makespan(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                         const std::vector<std::int64_t>& shares) {
  struct Finish {
    double seconds = 0.0;
    double error = 0.0;
  };
  std::vector<Finish> clusters(models.size());
  double low = 0.0;
  double high = 0.0;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (shares[i] == 0) continue;
    const double seconds = models[i].seconds(shares[i]);
    const double error = std::max(1e-6, error_with(context, i, shares[i]));
    Finish& finish = clusters[context.estimator.devices()[i].cluster];
    if (seconds > finish.seconds) finish = {seconds, error};
    low = std::max(low, seconds * (1.0 - kTail * error));
    high = std::max(high, seconds * (1.0 + kTail * error));
  }
  const double step = (high - low) / kIntegrationSteps;
  double sum = 0.0;
  for (int k = 0; k < kIntegrationSteps; ++k) {
    const double t = low + (k + 0.5) * step;
    double below = 1.0;
    for (const Finish& finish : clusters) {
      if (finish.seconds <= 0.0) continue;
      const double z = (t / finish.seconds - 1.0) / finish.error;
      if (z < kTail) below *= 0.5 * std::erfc(-z / std::numbers::sqrt2);
    }
    sum += 1.0 - below;
  }
  return low + sum * step;
}

}  // namespace

std::vector<plan::CostModel> estimated_models(const PolicyContext& context) {
  std::vector<plan::CostModel> models;
  for (std::size_t i = 0; i < context.limits.size(); ++i) models.push_back(context.estimator.model(i));
  return models;
}

std::vector<std::int64_t> best_split(const PolicyContext& context, const std::vector<plan::CostModel>& models) {
  plan::SplitOptions options = split_options(context);
  if (context.incumbent != nullptr) options.previous = *context.incumbent;
  std::vector<std::int64_t> best = plan::split_batch(context.batch_size, models, options).shares;
  if (context.incumbent != nullptr && best == *context.incumbent) return best;
  const auto working = std::count_if(context.limits.begin(), context.limits.end(),
                                     [](const plan::ShareLimits& limits) { return limits.maximum > 0; });
  if (working < 3) return best;  // the quantile is the median
  const double quantile = normal_quantile(1.0 - 1.0 / static_cast<double>(working));
  const std::vector<std::int64_t> plain = best;
  double soonest = expected_makespan(context, models, plain);
  for (const double part : kCaution) {
    std::vector<plan::CostModel> careful;
    for (std::size_t i = 0; i < models.size(); ++i) {
      careful.push_back(models[i].scaled(1.0 + part * quantile * error_with(context, i, plain[i])));
    }
    std::vector<std::int64_t> shares = plan::split_batch(context.batch_size, careful, options).shares;
    const double expected = expected_makespan(context, models, shares);
    if (expected >= soonest) continue;
    soonest = expected;
    best = std::move(shares);
  }
  return best;
}

double gain_error(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                  const std::vector<std::int64_t>& present) {
  std::size_t slowest = 0;
  double longest = -1.0;
  double rates = 0.0;
  const auto rate = [&](std::size_t i) { return 1.0 / std::max(models[i].per_item_seconds(), 1e-300); };
  for (std::size_t i = 0; i < models.size(); ++i) {
    rates += rate(i);
    if (present[i] == 0 || models[i].seconds(present[i]) <= longest) continue;
    longest = models[i].seconds(present[i]);
    slowest = i;
  }
  double variance = 0.0;
  for (std::size_t i = 0; i < models.size(); ++i) {
    const double part = rate(i) / rates;
    const double weight = i == slowest ? 1.0 - part : part;
    const double error = error_with(context, i, present[i]);
    variance += weight * weight * error * error;
  }
  return std::sqrt(variance);
}

}  // namespace paceline::balance

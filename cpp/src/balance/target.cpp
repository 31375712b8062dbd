// SPDX-License-Identifier: Apache-2.0
#include "balance/target.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/numbers.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::int64_t kMostGrowth = 2;
constexpr double kUnknownShape = 0.1;  // with a larger error, twice the size takes between 1 and 2 times as long
constexpr double kLeastSlope = 0.02;   // as the shape's own
constexpr double kGainErrors = 2.0;

double error_with(const PolicyContext& context, std::size_t device, std::int64_t items) {
  const double error = context.estimator.error_at(device, static_cast<double>(std::max<std::int64_t>(items, 1)));
  const double lent = context.lent.error(device);
  return lent > 0.0 ? std::hypot(error, lent) : error;
}

/// Limits each device to twice the largest size that was measured on its class, or twice an even share if that is more.
/// Beyond that neither its time nor its memory is known. It may grow again from there. There is no such limit if the
/// batch would not fit then, or might fall into a gap that minimums leave.
void hold_growth(const PolicyContext& context, plan::SplitOptions& options) {
  const std::int64_t grain = options.granularity;
  const auto working = std::count_if(options.limits.begin(), options.limits.end(),
                                     [](const plan::ShareLimits& limits) { return limits.maximum > 0; });
  if (working == 0) return;
  const std::int64_t even = context.batch_size / working + (context.batch_size % working != 0 ? 1 : 0);
  std::vector<plan::ShareLimits> held = options.limits;
  std::int64_t room = 0;
  std::int64_t gap = 0;  // the largest minimum that leaves one
  std::int64_t smallest = plan::ShareLimits::kUnlimited;
  for (std::size_t i = 0; i < held.size(); ++i) {
    if (held[i].maximum == 0) continue;
    if (held[i].minimum > grain) gap = std::max(gap, held[i].minimum);
    const std::int64_t most = plan::saturating_multiply(kMostGrowth, std::max(even, context.sizes.largest(i)));
    held[i].maximum = std::min(held[i].maximum, plan::rounded_up(most, grain));
    smallest = std::min(smallest, held[i].maximum);
    room = plan::saturating_add(room, std::min(held[i].maximum, context.batch_size) / grain * grain);
  }
  // Devices that may all have twice the largest minimum can share any batch.
  if (room >= context.batch_size && smallest / 2 >= gap) options.limits = std::move(held);
}

}  // namespace

std::vector<plan::CostModel> estimated_models(const PolicyContext& context) {
  std::vector<plan::CostModel> models;
  for (std::size_t i = 0; i < context.limits.size(); ++i)
    models.push_back(context.lent.slowed(i, context.estimator.model(i)));
  return models;
}

std::vector<std::int64_t> best_split(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                     bool cautious) {
  plan::SplitOptions options = split_options(context);
  hold_growth(context, options);
  if (context.incumbent != nullptr) options.previous = *context.incumbent;
  const std::vector<std::int64_t> plain = plan::split_batch(context.batch_size, models, options).shares;
  const auto working = std::count_if(context.limits.begin(), context.limits.end(),
                                     [](const plan::ShareLimits& limits) { return limits.maximum > 0; });
  if (!cautious || working < 3) return plain;  // of two devices the quantile is the median
  const double quantile = plan::normal_quantile(1.0 - 1.0 / static_cast<double>(working));
  std::vector<plan::CostModel> careful;
  for (std::size_t i = 0; i < models.size(); ++i) {
    careful.push_back(models[i].scaled(1.0 + quantile * error_with(context, i, plain[i])));
  }
  return plan::split_batch(context.batch_size, careful, options).shares;
}

bool is_little_known(const Estimator& estimator, std::size_t device) {
  return estimator.shape_of(device).error() >= kUnknownShape && estimator.devices()[device].pooled_centre_items > 0.0;
}

plan::CostModel with_fixed_part(const PolicyContext& context, std::size_t device, double errors) {
  const Estimator& estimator = context.estimator;
  const plan::CostModel model = estimator.model(device);
  const double centre = estimator.devices()[device].pooled_centre_items;
  const double seconds = model.fixed_seconds() + model.per_item_seconds() * centre;
  const double part = model.fixed_seconds() / seconds + errors * estimator.shape_of(device).error();
  const double fixed = std::clamp(part, 0.0, 1.0);
  return context.lent.slowed(
      device, plan::CostModel::affine(fixed * seconds, std::max(1.0 - fixed, kLeastSlope) * seconds / centre));
}

Growth growth(const PolicyContext& context, const std::vector<plan::CostModel>& models) {
  plan::SplitOptions options = split_options(context);
  Growth growth;
  growth.goal = plan::split_batch(context.batch_size, models, options).shares;
  growth.step = growth.goal;
  hold_growth(context, options);
  bool held = false;
  for (std::size_t i = 0; i < models.size(); ++i) {
    plan::ShareLimits& limits = options.limits[i];
    if (growth.goal[i] <= limits.maximum) continue;
    held = true;
    limits.minimum = limits.maximum;
    limits.may_be_zero = false;
  }
  if (held) growth.step = plan::split_batch(context.batch_size, models, options).shares;
  return growth;
}

double gain_error(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                  const std::vector<std::int64_t>& present, const std::vector<std::int64_t>& target) {
  std::size_t slowest = 0;
  double longest = -1.0;
  double rates = 0.0;
  const auto rate = [&](std::size_t i) { return 1.0 / std::max(models[i].per_item_seconds(), 1e-300); };
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (present[i] == 0 && target[i] == 0) continue;
    rates += rate(i);
    const double seconds = models[i].seconds(present[i]) + context.limits[i].startup_seconds;
    if (present[i] == 0 || seconds <= longest) continue;
    longest = seconds;
    slowest = i;
  }
  double variance = 0.0;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (present[i] == 0 && target[i] == 0) continue;
    const double part = rate(i) / rates;
    const double weight = i == slowest ? 1.0 - part : part;
    const std::int64_t items = present[i] > 0 ? present[i] : target[i];
    const double seconds = models[i].seconds(items);
    // The error of its speed does not apply to the time before it starts.
    const double startup = context.limits[i].startup_seconds;
    const double error = error_with(context, i, items) * (startup > 0.0 ? seconds / (seconds + startup) : 1.0);
    variance += weight * weight * error * error;
  }
  return std::sqrt(variance);
}

Promise promise_of(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                   const std::vector<std::int64_t>& present, const std::vector<std::int64_t>& target,
                   double least_gain) {
  const double now = makespan(context, models, present);
  const double then = makespan(context, models, target);
  const double error = kGainErrors * gain_error(context, models, present, target);
  return {.gain = now > 0.0 ? 1.0 - then / now : 0.0,
          .saved_seconds = now - then,
          .required = std::clamp(error, least_gain, 1.0)};
}

}  // namespace paceline::balance

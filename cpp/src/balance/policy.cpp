// SPDX-License-Identifier: Apache-2.0
#include "balance/policy.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

#include "plural.hpp"
#include "refuse.hpp"

namespace paceline {

std::string name_of(Balance balance) {
  if (balance == Balance::even) return "even";
  return balance == Balance::weighted ? "weighted" : "auto";
}

Balance balance_named(std::string_view name) {
  for (const Balance balance : {Balance::automatic, Balance::even, Balance::weighted}) {
    if (name == name_of(balance)) return balance;
  }
  refuse("unknown policy \"{}\": the policies are \"auto\", \"even\" and \"weighted\"", name);
}

}  // namespace paceline

namespace paceline::balance {
namespace {

constexpr std::size_t kGrains = 32;  // of an even share; half as many would cost 1.2 % on average

bool unlimited(const PolicyContext& context) {
  return context.granularity == 1 && std::ranges::all_of(context.limits, [](const plan::ShareLimits& limits) {
           return limits.minimum == 0 && limits.maximum == plan::ShareLimits::kUnlimited && limits.may_be_zero;
         });
}

}  // namespace

std::int64_t granularity_of(const BalancerOptions& options, std::int64_t batch_size) {
  if (options.granularity > 0) return options.granularity;
  // Libraries handle multiples of 8, and powers of two, best.
  const auto most = static_cast<std::uint64_t>(batch_size) / (kGrains * options.devices.size());
  return static_cast<std::int64_t>(most >= 8 ? most / 8 * 8 : std::max<std::uint64_t>(std::bit_floor(most), 1));
}

std::vector<double> fixed_ratios(const BalancerOptions& options) {
  const std::size_t count = options.devices.size();
  if (options.policy != Balance::weighted) {
    if (!options.weights.empty())
      refuse("weights are for the policy \"weighted\", not for \"{}\"", name_of(options.policy));
    return std::vector<double>(options.policy == Balance::even ? count : 0, 1.0);
  }
  if (options.weights.size() != count)
    refuse("{} for {}: give one per device", plural(options.weights.size(), "weight"), plural(count, "device"));
  for (std::size_t i = 0; i < count; ++i) {
    if (options.weights[i] >= 0.0 && std::isfinite(options.weights[i])) continue;
    refuse("the weight of {} is {}: weights are finite and not negative", options.devices[i].name, options.weights[i]);
  }
  if (*std::ranges::max_element(options.weights) <= 0.0)
    refuse("all weights are zero: at least one device must get work");
  return options.weights;
}

plan::SplitOptions split_options(const PolicyContext& context) {
  plan::SplitOptions options;
  options.limits.assign(context.limits.begin(), context.limits.end());
  options.granularity = context.granularity;
  options.reduction_seconds = context.reduction_seconds;
  return options;
}

std::vector<std::int64_t> split_by_weights(const PolicyContext& context, const std::vector<double>& weights) {
  std::vector<double> left = weights;
  std::vector<plan::CostModel> models;
  plan::SplitOptions options = split_options(context);
  options.reduction_seconds.clear();  // ratios are ratios: no device is left out to save a reduction
  double sum = 0.0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (context.limits[i].maximum == 0) left[i] = 0.0;
    if (left[i] == 0.0) options.limits[i] = {.minimum = 0, .maximum = 0};
    options.limits[i].startup_seconds = 0.0;
    models.push_back(plan::CostModel::affine(0.0, left[i] > 0.0 ? 1.0 / left[i] : 1.0));
    sum += left[i];
  }
  if (sum <= 0.0) refuse("every device with a weight is gone: give the others a weight");
  if (unlimited(context)) return plan::split_weighted(context.batch_size, left);
  return plan::split_batch(context.batch_size, models, options).shares;
}

double makespan(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                const std::vector<std::int64_t>& shares) {
  double longest = 0.0;
  std::size_t working = 0;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (shares[i] == 0) continue;
    ++working;
    longest = std::max(longest, models[i].seconds(shares[i]) + context.limits[i].startup_seconds);
  }
  return working < context.reduction_seconds.size() ? longest + context.reduction_seconds[working] : longest;
}

}  // namespace paceline::balance

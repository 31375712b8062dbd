// SPDX-License-Identifier: Apache-2.0
#include "balance/policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <paceline/error.hpp>

#include "balance/auto_policy.hpp"
#include "plural.hpp"

namespace paceline {

std::string name_of(Balance balance) {
  if (balance == Balance::even) return "even";
  return balance == Balance::weighted ? "weighted" : "auto";
}

Balance balance_named(std::string_view name) {
  for (const Balance balance : {Balance::automatic, Balance::even, Balance::weighted}) {
    if (name == name_of(balance)) return balance;
  }
  throw InvalidArgument(
      fmt::format("unknown policy \"{}\": the policies are \"auto\", \"even\" and \"weighted\"", name));
}

}  // namespace paceline

namespace paceline::balance {
namespace {

/// The same ratios every step, whatever is measured.
class FixedPolicy final : public Policy {
 public:
  FixedPolicy(std::vector<double> weights, std::string reason)
      : weights_(std::move(weights)), reason_(std::move(reason)) {}

  Proposal propose(const PolicyContext& context) override { return {split_by_weights(context, weights_), reason_}; }

 private:
  std::vector<double> weights_;
  std::string reason_;
};

bool unlimited(const PolicyContext& context) {
  return context.options.granularity == 1 &&
         std::all_of(context.limits.begin(), context.limits.end(), [](const plan::ShareLimits& limits) {
           return limits.minimum == 0 && limits.maximum == plan::ShareLimits::kUnlimited && limits.may_be_zero;
         });
}

}  // namespace

std::unique_ptr<Policy> make_policy(const BalancerOptions& options) {
  const std::size_t count = options.devices.size();
  if (options.policy != Balance::weighted && !options.weights.empty()) {
    throw InvalidArgument(
        fmt::format("weights are for the policy \"weighted\", not for \"{}\"", name_of(options.policy)));
  }
  if (options.policy == Balance::automatic) return std::make_unique<AutoPolicy>(options);
  if (options.policy == Balance::even)
    return std::make_unique<FixedPolicy>(std::vector<double>(count, 1.0), "even, as asked");
  if (options.weights.size() != count) {
    throw InvalidArgument(fmt::format("{} for {}: give one per device", plural(options.weights.size(), "weight"),
                                      plural(count, "device")));
  }
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!(options.weights[i] >= 0.0) || !std::isfinite(options.weights[i])) {
      throw InvalidArgument(fmt::format("the weight of {} is {}: weights are finite and not negative",
                                        options.devices[i].name, options.weights[i]));
    }
    sum += options.weights[i];
  }
  if (sum <= 0.0) throw InvalidArgument("all weights are zero: at least one device must get work");
  return std::make_unique<FixedPolicy>(options.weights, "by the given ratios");
}

plan::SplitOptions split_options(const PolicyContext& context) {
  plan::SplitOptions options;
  options.limits = context.limits;
  options.granularity = context.options.granularity;
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
  if (sum <= 0.0) throw InvalidArgument("every device with a weight is gone: give the others a weight");
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

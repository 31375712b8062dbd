// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/plan/split.hpp>

#include "balance/estimator.hpp"
#include "balance/size_history.hpp"
#include "balance/startup_cost.hpp"

namespace paceline::balance {

/// What a policy may look at. References are valid during the call only.
struct PolicyContext {
  const BalancerOptions& options;
  const Estimator& estimator;
  const StartupCost& startup;
  const SizeHistory& sizes;
  const std::vector<plan::ShareLimits>&
      limits;  ///< the options' with measured start-ups, maximum 0 for retired devices
  const std::vector<double>& reduction_seconds;  ///< as in plan::SplitOptions, measured or given
  std::int64_t step = 0;                         ///< number of the step being planned or observed
  std::int64_t batch_size = 0;
  const std::vector<std::int64_t>* incumbent = nullptr;  ///< the split in force for this batch size, or null
};

struct Proposal {
  std::vector<std::int64_t> shares;
  std::string reason;
  /// If `shares` are for this step only, to learn from it: the split that stays in force. Otherwise empty.
  std::vector<std::int64_t> in_force = {};
};

/// A rule that turns what is known into shares.
///
/// Lifecycle, driven by Balancer:
/// 1. construct: once, by make_policy(), from checked options.
/// 2. propose(): before every step. Shares must sum to the batch and respect the limits. It may be called again without
///    an observe() in between (the step failed) and must then propose the same for the same batch size, unless a device
///    was retired.
/// 3. observe(): once per step that succeeded, after the estimator has taken its timings.
/// 4. retired(): a device left, or the shares in force have become too small; context.limits already say so. Learned
///    state about splits may be void.
/// 5. describe(): fills the report's policy part, at any time.
/// A policy is a pure function of these calls: no clock, no random numbers.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual Proposal propose(const PolicyContext& context) = 0;
  virtual void observe(const PolicyContext&, const StepTimings&, double /*makespan_seconds: 0 if not comparable*/) {}
  virtual void retired(const PolicyContext&) {}
  virtual void describe(BalanceReport&) const {}
};

/// @throws InvalidArgument for an unknown name or weights that do not fit.
[[nodiscard]] std::unique_ptr<Policy> make_policy(const BalancerOptions& options);

/// The split of the user's ratios (all ones: even), within limits and granularity.
[[nodiscard]] std::vector<std::int64_t> split_by_weights(const PolicyContext& context,
                                                         const std::vector<double>& weights);

/// The split options of a context, without a previous split.
[[nodiscard]] plan::SplitOptions split_options(const PolicyContext& context);

/// Makespan of `shares` by `models`, start-up and the reduction of as many devices as have work included.
[[nodiscard]] double makespan(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                              const std::vector<std::int64_t>& shares);

}  // namespace paceline::balance

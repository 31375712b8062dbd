// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/plan/split.hpp>

#include "balance/estimator.hpp"
#include "balance/lent_time.hpp"
#include "balance/size_history.hpp"
#include "balance/startup_cost.hpp"

namespace paceline::balance {

/// What a policy may look at. References are valid during the call only.
struct PolicyContext {
  const BalancerOptions& options;
  const Estimator& estimator;
  const StartupCost& startup;
  const LentTime& lent;
  const SizeHistory& sizes;
  std::span<const plan::ShareLimits> limits;  ///< the options' with measured start-ups, maximum 0 for retired devices
  const std::vector<double>& reduction_seconds;  ///< as in plan::SplitOptions, measured or given
  std::int64_t step = 0;                         ///< number of the step being planned or observed
  std::int64_t batch_size = 0;
  std::int64_t granularity = 1;                          ///< of this batch size
  const std::vector<std::int64_t>* incumbent = nullptr;  ///< the split in force for this batch size, or null
  const std::vector<plan::CostModel>* hints = nullptr;   ///< what an earlier run measured of all devices, or null
};

struct Proposal {
  std::vector<std::int64_t> shares;
  std::string reason;
  /// If `shares` are for this step only, to learn from it: the split that stays in force. Otherwise empty.
  std::vector<std::int64_t> in_force = {};
};

/// What shares of a batch are multiples of: as the options say, or chosen by the sizes.
[[nodiscard]] std::int64_t granularity_of(const BalancerOptions& options, std::int64_t batch_size);

/// The ratios of the policies "even" and "weighted", which do not depend on what is measured; none for "auto".
/// @throws InvalidArgument for weights that do not fit.
[[nodiscard]] std::vector<double> fixed_ratios(const BalancerOptions& options);

/// The split of the user's ratios (all ones: even), within limits and granularity.
[[nodiscard]] std::vector<std::int64_t> split_by_weights(const PolicyContext& context,
                                                         const std::vector<double>& weights);

/// The split options of a context, without a previous split.
[[nodiscard]] plan::SplitOptions split_options(const PolicyContext& context);

/// Makespan of `shares` by `models`, start-up and the reduction of as many devices as have work included.
[[nodiscard]] double makespan(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                              const std::vector<std::int64_t>& shares);

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "balance/policy.hpp"

namespace paceline::balance {

/// The models of all devices as estimated.
[[nodiscard]] std::vector<plan::CostModel> estimated_models(const PolicyContext& context);

/// The exact split for the estimated times; `cautious`: for each device's time at its (N - 1) / N quantile. No device
/// gets more than twice the largest share that was measured on its class, or twice an even one, unless there is no
/// other way.
///
/// An item too many on one device delays the whole step, an item too few costs each of the others 1 / (N - 1) of it:
/// the newsvendor's rule. It keeps first, rough splits from overloading the device they know least (observed: after a
/// 2x throttle of one of 8 devices the plain split was more than 5 % off in 4 % of runs). With many samples it is only
/// timid, and the plain split is better.
[[nodiscard]] std::vector<std::int64_t> best_split(const PolicyContext& context,
                                                   const std::vector<plan::CostModel>& models, bool cautious);

/// The standard error of the gain of going from `present` to `target`: the device that is waited for now, against the
/// average of all that have work in either. A device that stays out has no part in it, however little is known of it.
[[nodiscard]] double gain_error(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                const std::vector<std::int64_t>& present, const std::vector<std::int64_t>& target);

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "balance/policy.hpp"

namespace paceline::balance {

/// The models of all devices as estimated.
[[nodiscard]] std::vector<plan::CostModel> estimated_models(const PolicyContext& context);

/// The split that is expected to end soonest, given the estimates and their errors.
///
/// Candidates are the exact splits for each device's time at three quantiles, from the median to (N - 1) / N; the
/// expectation of the makespan is integrated over independent normal errors of the clusters of equal devices.
[[nodiscard]] std::vector<std::int64_t> best_split(const PolicyContext& context,
                                                   const std::vector<plan::CostModel>& models);

/// The standard error of the gain of leaving `present`: the device that is waited for now, against the average of all.
[[nodiscard]] double gain_error(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                const std::vector<std::int64_t>& present);

}  // namespace paceline::balance

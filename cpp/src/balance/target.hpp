// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <paceline/device_id.hpp>

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

/// The exact split for some models, and a step towards it.
struct Growth {
  std::vector<std::int64_t> goal;  ///< however much a device grows
  std::vector<std::int64_t>
      step;  ///< devices that would grow too much get as much as best_split() lets them; else the goal
};

/// For small batches beside reductions that cost, one device with the whole batch may be best, while two devices with
/// half of it each are worse than what is in force: no move leads there (observed in random boxes: at worst 87 % above
/// the best subset, for good).
[[nodiscard]] Growth growth(const PolicyContext& context, const std::vector<plan::CostModel>& models);

/// Whether next to nothing is known of what sizes cost that were not run.
[[nodiscard]] bool is_little_known(const Estimator& estimator, DeviceId device);
/// The device's model, with so many standard errors more of its time fixed. Where it was measured it stays as long.
[[nodiscard]] plan::CostModel with_fixed_part(const Estimator& estimator, DeviceId device, double errors);

/// Models in which the time of a class that has no work, and whose fixed part is not known, is as fixed as it may be
/// (2 standard errors). None where there is no such class.
[[nodiscard]] std::optional<std::vector<plan::CostModel>> hopeful_models(const PolicyContext& context,
                                                                         const std::vector<std::int64_t>& present);

/// The standard error of the gain of going from `present` to `target`: the device that is waited for now, against the
/// average of all that have work in either. A device that stays out has no part in it, however little is known of it.
[[nodiscard]] double gain_error(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                const std::vector<std::int64_t>& present, const std::vector<std::int64_t>& target);

}  // namespace paceline::balance

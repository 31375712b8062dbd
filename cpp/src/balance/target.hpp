// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "balance/policy.hpp"

namespace paceline::balance {

/// The models of all devices as estimated.
[[nodiscard]] std::vector<plan::CostModel> estimated_models(const PolicyContext& context);

/// The exact split for the estimated times, or, if `cautious`, for each device's time at its (N - 1) / N quantile. No
/// device gets more than twice the largest share that was measured on its class, or twice an even one, unless there is
/// no other way.
///
/// The quantile is the newsvendor's: an item too many on one device delays the whole step, an item too few costs each
/// of the others 1 / (N - 1) of that. It keeps a first, rough split from overloading the device that is known least
/// (in simulation, after a 2x throttle of one of 8 devices, the plain split was more than 5 % off in 4 % of runs). With
/// many samples the plain split is better.
[[nodiscard]] std::vector<std::int64_t> best_split(const PolicyContext& context,
                                                   const std::vector<plan::CostModel>& models, bool cautious);

/// The exact split for some models, and a step towards it.
struct Growth {
  std::vector<std::int64_t> goal;  ///< however much a device grows
  std::vector<std::int64_t>
      step;  ///< devices that would grow too much get as much as best_split() lets them; else the goal
};

[[nodiscard]] Growth growth(const PolicyContext& context, const std::vector<plan::CostModel>& models);

/// Whether next to nothing is known about the time of sizes that were not run.
[[nodiscard]] bool is_little_known(const Estimator& estimator, std::size_t device);
/// The device's model with a fixed part that is larger by so many standard errors. The time at the measured size stays.
[[nodiscard]] plan::CostModel with_fixed_part(const PolicyContext& context, std::size_t device, double errors);

/// The standard error of the gain of going from `present` to `target`. It compares the device that finishes last now
/// with the average of all devices that have work in either split.
[[nodiscard]] double gain_error(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                const std::vector<std::int64_t>& present, const std::vector<std::int64_t>& target);

/// What a move must promise at least, and also what makes a split worth a step that explores it.
inline constexpr double kLeastGain = 0.01;

/// What going from one split to another would bring, and what it must.
struct Promise {
  double gain = 0.0;           ///< of a step's time
  double saved_seconds = 0.0;  ///< of each step
  double required = 0.0;
};
/// `required` is two standard errors of the gain, but at least `least_gain`.
[[nodiscard]] Promise promise_of(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                 const std::vector<std::int64_t>& present, const std::vector<std::int64_t>& target,
                                 double least_gain);

}  // namespace paceline::balance

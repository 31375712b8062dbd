// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <paceline/plan/cost_model.hpp>

#include "balance/policy.hpp"

namespace paceline::balance {

/// Gives a device that has no work a little of it now and then, so that a recovery is noticed.
///
/// A device with a zero share is not measured; what was true when it lost its work would be believed for good (observed
/// in simulation: two spikes running on a throttled device idled it for the rest of the run). The first probe comes 100
/// steps after it fell idle, the waits double to 1600. A probe that comes out differently is repeated at once, since
/// two outliers make a change point of a device that was not seen for longer than any excursion lasts.
///
/// A probe has as many items as the device would have done when the others finish: that costs nothing if the estimate
/// is right, and it teaches the time of the size that a return would bring. Where not even the least share is done by
/// then, it is the least share, and the dearer that is the rarer: at most 2 % of the time until the first one, 0.5 % in
/// the long run. A device about which little is known at the size that costs nothing is probed at once, four times at
/// most: one left out because of a wrong guess comes back within a few steps, not after hundreds. A device that would
/// stay out at its class's best speed is not asked.
class Probe {
 public:
  /// `present` with a little work for the devices that are due, or none.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> shares(const PolicyContext& context,
                                                                const std::vector<std::int64_t>& present);
  /// After every step.
  void observe(const PolicyContext& context, const StepTimings& timings);

 private:
  struct Idle {
    std::int64_t since_step = 0;  ///< when it fell idle, or was asked last
    std::int64_t due_step = 0;
    std::int64_t wait = 0;
    std::int64_t longest_wait = 0;
    int quick = 0;  ///< probes before the first wait was over
  };
  [[nodiscard]] static std::int64_t size(const PolicyContext& context, const plan::CostModel& model, std::size_t i,
                                         double others_seconds);
  [[nodiscard]] static std::vector<plan::ShareLimits> in_time(const PolicyContext& context, std::size_t i);
  [[nodiscard]] static bool could_pay(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                                      const std::vector<std::int64_t>& present, std::size_t i);
  [[nodiscard]] static bool take(const PolicyContext& context, std::vector<std::int64_t>& shares, std::size_t i,
                                 std::int64_t wanted);

  std::map<std::size_t, Idle> idle_;
  std::vector<std::size_t> asked_;  // in step asked_step_
  std::int64_t asked_step_ = -1;
};

}  // namespace paceline::balance

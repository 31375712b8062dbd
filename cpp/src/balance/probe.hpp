// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <paceline/plan/cost_model.hpp>

#include "balance/policy.hpp"

namespace paceline::balance {

/// Gives a device without work a little work now and then, to notice that the device has recovered.
///
/// A device without work is not measured, so the last estimate would be believed for good (in simulation, two
/// successive spikes on a throttled device left it without work for the rest of the run). The first probe comes 100
/// steps after the device lost its work. Then the waits double, up to 1600 steps. A probe with an unexpected time is
/// repeated at once: two outliers make a change point.
///
/// A probe has as many items as the device can run before the others finish. That costs nothing if the estimate is
/// right, and it measures the size that the device would get on its return. If the device cannot even run its least
/// share by then, the probe is the least share. The more such a probe costs, the rarer it is: probes take at most 2 %
/// of the time before the first one, and 0.5 % in the long run. A device about which little is known is probed at once,
/// at the size that costs nothing, four times at most. So a device that was left out because of a wrong guess comes
/// back within a few steps. A device that would stay out even at the best speed of its class is not probed.
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

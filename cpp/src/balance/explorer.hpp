// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <paceline/plan/cost_model.hpp>

#include "balance/policy.hpp"

namespace paceline::balance {

/// Plans steps off the split in force, for what they teach. There are three reasons for one.
///
/// *Calibration*, in the first steps. With one size, the constant part of a time and the part per item cannot be told
/// apart, and the first real move would be an extrapolation. If k of N devices get sizes that differ by D, this costs
/// about D k / (N - k) of one step, because the others' surplus is waited for, and its information is N k D^2 / (N -
/// k). So information per loss grows with D and does not depend on k. Therefore few devices get much less, a quarter of
/// an even share, and the others get at most a third more, because memory may be tight. There are two such steps, since
/// the first step of a process is often odd. There is no calibration if limits forbid it or the batch is too small. It
/// ends early if several micro-batch sizes in a step tell the two parts apart.
///
/// *Probes* of devices without work, to notice that they have recovered (in simulation, two successive spikes on a
/// throttled device left it without work for the rest of the run). The first probe comes 100 steps after the device
/// lost its work. Then the waits double, up to 1600 steps. A probe with an unexpected time is repeated at once: two
/// outliers make a change point. A probe has as many items as the device can run before the others finish. That costs
/// nothing if the estimate is right, and it measures the size that the device would get on its return. If the device
/// cannot even run its least share by then, the probe is the least share. The more such a probe costs, the rarer it is:
/// probes take at most 2 % of the time before the first one, and 0.5 % in the long run. A device about which little is
/// known is probed at once, at the size that costs nothing, four times at most. A device that would stay out even at
/// the best speed of its class is not probed.
///
/// *Growth*. With a small batch and expensive reductions one device with the whole batch may be best, while two devices
/// with half of it each are worse than the present split. Then no move that at most doubles a share leads there (in
/// random boxes the present split was up to 87 % above the best subset, for good). So that device grows in single
/// steps, at most twofold each, until its time at the larger size is measured. A device of a class that was left out
/// before it had run two sizes does the same, eight times at most, because how much of its time is fixed is a guess.
class Explorer {
 public:
  using Shares = std::vector<std::int64_t>;

  explicit Explorer(bool calibrates) : calibrated_(!calibrates) {}

  /// Before a step is planned.
  void begin() { planned_ = Planned::split; }
  [[nodiscard]] bool calibrated() const { return calibrated_; }
  /// Whether the step that is planned is off the split.
  [[nodiscard]] bool explores() const { return planned_ != Planned::split; }

  /// `even` with sizes off it, or none.
  [[nodiscard]] std::optional<Shares> calibrate(const PolicyContext& context, const Shares& even);
  /// `present` with a little work for the devices that are due, or none.
  [[nodiscard]] std::optional<Shares> probe(const PolicyContext& context, const Shares& present);
  /// A step in which a device grows towards a split that gains. None if there is no such split, or if it is too early.
  [[nodiscard]] std::optional<Shares> grow(const PolicyContext& context, const Shares& present);

  /// After every step.
  void observe(const PolicyContext& context, const StepTimings& timings);

 private:
  enum class Planned : std::uint8_t { split, calibration, probe, growth, hope };
  struct Idle {
    std::int64_t since_step = 0;  ///< when it fell idle, or was asked last
    std::int64_t due_step = 0;
    std::int64_t wait = 0;
    std::int64_t longest_wait = 0;
    int quick = 0;  ///< probes before the first wait was over
  };
  void observe_probe(const PolicyContext& context, const StepTimings& timings);

  Planned planned_ = Planned::split;
  bool calibrated_;
  int calibrations_ = 0;
  int informative_ = 0;  // calibrations with evidence
  int hopes_ = 0;        // steps planned for what a class may turn out to be
  std::map<std::size_t, Idle> idle_;
  std::vector<std::size_t> asked_;  // in the last probe
};

}  // namespace paceline::balance

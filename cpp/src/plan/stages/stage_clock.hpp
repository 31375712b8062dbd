// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/stages/dataflow.hpp"
#include "plan/stages/stage_costs.hpp"

namespace paceline::plan {

/// The recurrence of pipeline_times() for one partition, one number of micro-batches, and any depths, without making a
/// schedule.
class StageClock {
 public:
  explicit StageClock(const StageCosts& costs) : costs_(costs) {}

  /// False, with nothing else to be asked, if a stage does not fit its device with one micro-batch in flight.
  /// `most_in_flight`: 0 for no limit but memory.
  bool set(const Partition& partition, const BatchSizes& sizes, std::int64_t most_in_flight);

  /// The most that each stage may have in flight, not rising from stage to stage.
  [[nodiscard]] const std::vector<std::int64_t>& most_depths() const { return most_; }
  [[nodiscard]] double bound() const { return bound_; }
  [[nodiscard]] FlowTimes times() const { return {larger_, smaller_, static_cast<std::size_t>(larger_count_)}; }

  /// The fewest in flight with which every stage begins a micro-batch as often as the slowest one can, or as often as
  /// memory allows. Once the pipeline is full, that is the least time of a micro-batch.
  [[nodiscard]] std::vector<std::int64_t> steady_depths() const;

  /// Seconds of a step with these depths, which are at most most_depths() and do not rise.
  [[nodiscard]] double seconds(std::span<const std::int64_t> depths);
  /// Actions that seconds() has gone through in all: what a search costs, independent of the machine.
  [[nodiscard]] std::int64_t actions() const { return actions_; }

 private:
  [[nodiscard]] std::vector<std::int64_t> depths_for(double cycle) const;

  const StageCosts& costs_;
  std::int64_t count_ = 0;
  std::int64_t larger_count_ = 0;
  std::vector<StageTimes> larger_, smaller_;  // of a larger and of a smaller micro-batch
  std::vector<std::int64_t> most_;
  double bound_ = 0.0;
  Recurrence recurrence_;
  std::int64_t actions_ = 0;
};

/// The depths that make a step shortest.
struct Depths {
  std::vector<std::int64_t> depths;
  double seconds = 0.0;
};

/// All depths that do not rise from stage to stage are tried, with 1 on the last stage: more there only delays its
/// backwards. Among equal times the fewest in flight win.
[[nodiscard]] Depths best_depths(StageClock& clock);
/// So many depths would best_depths() try; INT64_MAX if there are more.
[[nodiscard]] std::int64_t depth_count(const StageClock& clock);
/// The best of steady_depths(), more than these, and `hint` (empty: none). If it is below `promising`, it is improved
/// stage by stage until it meets the bound, stays, or has taken long.
[[nodiscard]] Depths good_depths(StageClock& clock, double promising, std::span<const std::int64_t> hint);

/// Equal but for rounding: sums of the same times in another order.
inline constexpr double kTie = 1e-9;

}  // namespace paceline::plan

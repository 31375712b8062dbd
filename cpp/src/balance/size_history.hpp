// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <paceline/balance/balancer.hpp>

namespace paceline::balance {

/// From the first start to the last finish: by the clock, or the longest sum of a device. Excluded runs count.
[[nodiscard]] double seconds_of(const StepTimings& timings);
/// Whether a compilation or another first run makes the step incomparable.
[[nodiscard]] bool any_excluded(const StepTimings& timings);

/// Which shares each device has run, and what the first run of a share costs: compilation, a search for the best
/// algorithm, a captured graph, a layer that moves.
///
/// The cost is how much longer a step took than the models say, for steps whose timings are marked as first runs
/// (MicroBatchTiming::excluded). It is the median of the last such steps, because the very first one does much that
/// later ones do not. Where nothing is marked (fixed micro-batches, shapes that may vary) a first run is free.
class SizeHistory {
 public:
  explicit SizeHistory(std::vector<std::size_t> class_of);

  /// One step that ran `shares`.
  void record(const std::vector<std::int64_t>& shares, const StepTimings& timings);

  /// Whether a device would run a share that it never ran.
  [[nodiscard]] bool is_new(const std::vector<std::int64_t>& shares) const;
  /// Seconds that such a step takes longer than its makespan. `makespan` returns the makespan of shares by the models.
  [[nodiscard]] double first_run_seconds(
      const std::function<double(const std::vector<std::int64_t>& shares)>& makespan) const;
  /// The largest share that the device or another one of its class ever ran; 0: none.
  [[nodiscard]] std::int64_t largest(std::size_t device) const { return largest_[class_of_[device]]; }

 private:
  [[nodiscard]] bool has_run(std::size_t device, std::int64_t share) const;

  struct FirstRun {
    std::vector<std::int64_t> shares;
    double seconds = 0.0;  // of the whole step; 0: nothing was excluded
  };

  std::vector<std::size_t> class_of_;
  std::vector<std::int64_t> largest_;           // by class
  std::vector<std::vector<std::int64_t>> ran_;  // the shares of each device, oldest first
  std::vector<FirstRun> first_runs_;
};

}  // namespace paceline::balance

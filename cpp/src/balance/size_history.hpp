// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/device_id.hpp>

namespace paceline::balance {

/// Which shares each device has run, and what it cost to run one for the first time: compilation, a search for the best
/// algorithm, a captured graph, a layer that moves.
///
/// The cost is measured: by how much a step whose timings say so (MicroBatchTiming::excluded) took longer than the
/// models tell; the median of the last such steps, since the first of all does much that no other will. Where a new
/// share is no new size for the device (fixed micro-batches, shapes that may vary) nothing is excluded, and it is free.
class SizeHistory {
 public:
  explicit SizeHistory(std::vector<std::size_t> class_of);

  /// One step that ran `shares`.
  void record(const std::vector<std::int64_t>& shares, const StepTimings& timings);

  /// Whether a device would run a share that it never ran.
  [[nodiscard]] bool is_new(const std::vector<std::int64_t>& shares) const;
  /// Seconds that such a step takes longer than its makespan, which `makespan` tells of shares.
  [[nodiscard]] double first_run_seconds(
      const std::function<double(const std::vector<std::int64_t>& shares)>& makespan) const;
  /// The largest share that the device or another one of its class ever ran; 0: none.
  [[nodiscard]] std::int64_t largest(DeviceId device) const { return largest_[class_of_[device]]; }

 private:
  struct Device {
    std::set<std::int64_t> shares;
    std::deque<std::int64_t> oldest_first;
  };
  struct FirstRun {
    std::vector<std::int64_t> shares;
    double seconds = 0.0;  // of the whole step; 0: nothing was excluded
  };

  std::vector<std::size_t> class_of_;
  std::vector<std::int64_t> largest_;  // by class
  std::vector<Device> devices_;
  std::deque<FirstRun> first_runs_;
};

}  // namespace paceline::balance

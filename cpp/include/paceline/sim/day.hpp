// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/pool_scale.hpp>

namespace paceline::sim {

/// A pool whose devices come and go over a day: requests by the hour, with bursts.
struct DayOptions {
  std::vector<double> speeds = {1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25};
  double activation_seconds = 5.0;  ///< of each device, such as the load of its weights
  plan::ScaleOptions scale = {};
  double job_seconds = 0.05;  ///< mean at speed 1
  double variation = 0.3;     ///< coefficient of variation of a job's work, log-normal
  double hours = 24.0;
  double low = 0.1;          ///< arriving work by night, over what all devices do
  double high = 0.6;         ///< by day
  std::int64_t bursts = 24;  ///< at random times
  double burst = 0.3;        ///< what one adds, over what all devices do
  double burst_seconds = 240.0;
  double ramp_seconds = 60.0;  ///< in which a burst comes, and goes
  std::uint64_t seed = 1;
  /// Mean deadline in seconds; each job's is uniform between half of it and one and a half. Infinity: none.
  double deadline_seconds = std::numeric_limits<double>::infinity();
};

struct DayResult {
  std::int64_t minutes = 0;
  std::int64_t met = 0;      ///< in which the mean wait of the jobs that came then, and started, was at most the target
  std::int64_t all_met = 0;  ///< `met`, with all devices active all day
  double device_hours = 0.0;       ///< from when a device was wanted until it was not
  double best_device_hours = 0.0;  ///< of a plan that knows all jobs, and meets the target in every minute that can
  double all_device_hours = 0.0;   ///< of all devices all the time
  double mean_wait_seconds = 0.0;
  std::int64_t activations = 0;
  double in_time = 0.0;  ///< parts of all jobs: completed before the deadline, ...
  double late = 0.0;     ///< completed after it
  double rejected = 0.0;
  double expired = 0.0;
  double all_in_time = 0.0;  ///< `in_time`, with all devices active all day
};

/// Runs plan::Scaler and plan::PoolState on a virtual clock. Deterministic. Devices that deadlines need are wanted at
/// once, as by a Pool. For other jobs the scaler looks once a second. A Pool also looks at once when what waits begins
/// to take longer than the target (plan::PoolState::want_above).
///
/// The plan in hindsight chooses devices for each minute. It knows which jobs come and what they take, begins each
/// minute without a queue, pays for activations before the minute, and is the best sequence by dynamic programming.
/// Within a minute it keeps its devices. It knows no deadlines, and serves all jobs.
/// @throws InvalidArgument if an option is not valid.
[[nodiscard]] PACELINE_API DayResult simulate_day(const DayOptions& options);

}  // namespace paceline::sim

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/pool.hpp>

namespace paceline::sim {

/// A pool of devices of unequal speeds under a stream of requests.
struct PoolSimulationOptions {
  std::vector<double> speeds = {1.0, 1.0, 0.5, 0.25};
  std::vector<double> believed = {};  ///< what the pool takes the speeds to be; empty: the truth
  plan::PoolOptions pool = {};
  /// n requests at once take (fixed + per_item * n) / speed seconds in the mean.
  double fixed_seconds = 0.0;
  double per_item_seconds = 0.01;
  std::vector<std::int64_t> sizes = {1};  ///< of batches
  /// Coefficient of variation of the requests' lengths, log-normal with mean 1, which the pool is told. 0: all equal. A
  /// batch is padded: it takes as long as one of its number times its longest.
  double length_variation = 0.0;
  double max_delay_seconds = 0.0;
  double load = 0.7;  ///< arriving work over what all devices can do in full batches without padding
  /// Requests that arrive at once: their mean number, geometric. 1: one after the other (Poisson).
  double burst = 1.0;
  /// Coefficient of variation of the time of a batch: log-normal, or with larger sizes than 1 normal, at least half of
  /// the mean.
  double variation = 0.3;
  bool exponential = false;  ///< times are exponential instead
  /// Mean deadline in seconds; each request's is uniform between half of it and one and a half. Infinity: none.
  double deadline_seconds = std::numeric_limits<double>::infinity();
  std::int64_t requests = 20000;
  std::uint64_t seed = 1;
};

struct PoolSimulationResult {
  double p50_seconds = 0.0;  ///< from submit to result, of those that completed, without the first tenth
  double p99_seconds = 0.0;
  double mean_seconds = 0.0;
  double mean_batch = 0.0;
  double in_time = 0.0;  ///< parts of all requests: completed before the deadline, ...
  double late = 0.0;     ///< completed after it
  double rejected = 0.0;
  double expired = 0.0;
  double elapsed_seconds = 0.0;
  std::vector<double> busy = {};           ///< per device: the part of the time in which it works
  std::vector<std::int64_t> batches = {};  ///< per device
};

/// Runs the decisions of plan::PoolState on a virtual clock. Deterministic; the n-th request arrives at the same time
/// with the same work whatever the placement.
/// @throws InvalidArgument if an option is not valid.
[[nodiscard]] PACELINE_API PoolSimulationResult simulate_pool(const PoolSimulationOptions& options);

}  // namespace paceline::sim

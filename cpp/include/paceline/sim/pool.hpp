// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/pool.hpp>

namespace paceline::sim {

/// Who shares a simulated pool: plan::PoolTenant.
struct SimulatedTenant {
  double weight = 1.0;
  double share = 1.0;  ///< of the requests, over the sum of all shares
};

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
  /// Arriving work over what all devices can do in full batches without padding. A gang counts as one job alone on each
  /// of its devices.
  double load = 0.7;
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
  std::vector<SimulatedTenant> tenants = {};  ///< empty: nobody has a name
  double gang_part = 0.0;  ///< of the jobs: they run on `gang` devices at once. They take as long as on the slowest
  std::int64_t gang = 2;
  /// Jobs of a request, each after the one before. All are submitted when it arrives, with its deadline. If one is
  /// rejected, those before it are cancelled.
  std::int64_t stages = 1;
};

struct SimulatedWaits {
  double p50_seconds = 0.0;
  double p99_seconds = 0.0;
  double mean_seconds = 0.0;
};

/// What comes of gangs.
struct SimulatedGangs {
  /// From when a job could run to its start, of those that started, without the first tenth of all requests.
  SimulatedWaits waits = {};
  SimulatedWaits other_waits = {};  ///< of jobs on one device
  double idle = 0.0;                ///< part of all devices' time in which they are idle while a gang waits
  double reserved = 0.0;            ///< of the same: while they leave another job waiting, which would hold up the gang
  double backfilled = 0.0;          ///< part of the jobs on one device: started while a gang waited that is before them
};

/// What comes of a tenant.
struct SimulatedTenantResult {
  double p50_wait_seconds = 0.0;  ///< like SimulatedGangs::waits, of all its jobs
  double p99_wait_seconds = 0.0;
  double mean_wait_seconds = 0.0;
  double served = 0.0;                 ///< its part of the cost of all requests that started
  double served_while_all_wait = 0.0;  ///< the same of those that started while requests of every tenant waited
  double largest_charge = 0.0;         ///< that one request cost it
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
  std::vector<SimulatedTenantResult> tenants = {};
  /// How far two tenants whose requests both wait get apart at most, |W1 / w1 - W2 / w2| with W the costs of what each
  /// was served since both began to wait, over the bound l1 / w1 + l2 / w2 of start-time fair queueing (Goyal, Vin and
  /// Cheng, 1996), l the largest charge of one request. At most 1. NaN where the bound says nothing: with deadlines,
  /// with lengths, since batches are of like ones, with gangs, which wait while others start, with a placement that
  /// binds requests to devices, or where no two tenants waited.
  double unfairness = std::numeric_limits<double>::quiet_NaN();
  SimulatedGangs gangs = {};
};

/// Runs the decisions of plan::PoolState on a virtual clock. Deterministic; the n-th request arrives at the same time
/// with the same work whatever the placement.
/// @throws InvalidArgument if an option is not valid.
[[nodiscard]] PACELINE_API PoolSimulationResult simulate_pool(const PoolSimulationOptions& options);

}  // namespace paceline::sim

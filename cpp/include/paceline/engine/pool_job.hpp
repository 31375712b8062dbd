// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/pool_types.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>

/// What a job of a Pool is given, and what the pool is told of it.
namespace paceline {

using plan::JobId;
using plan::Priority;

/// Where a job runs. A reference is good while the job runs.
class PACELINE_API Job {
 public:
  /// A model on a device of the job that has to leave its memory before the job runs.
  struct Eviction {
    std::string device;
    std::string model;
  };

  explicit Job(std::vector<const Device*> devices, std::vector<Stream*> streams = {},
               std::vector<Eviction> evicted = {})
      : devices_(std::move(devices)), streams_(std::move(streams)), evicted_(std::move(evicted)) {}
  /// The device on whose worker the job runs.
  [[nodiscard]] const Device& device() const noexcept { return *devices_.front(); }
  /// All devices of a gang: the job's own, and those that run nothing of this pool meanwhile.
  [[nodiscard]] std::span<const Device* const> devices() const noexcept { return devices_; }
  /// On a GPU: the stream for what the job enqueues. The job ends when the GPU has done it. Null on a host device.
  [[nodiscard]] Stream* stream() const noexcept { return streams_.empty() ? nullptr : streams_.front(); }
  /// Those of devices(), which must end, too.
  [[nodiscard]] std::span<Stream* const> streams() const noexcept { return streams_; }
  [[nodiscard]] std::span<const Eviction> evicted() const noexcept { return evicted_; }
  /// So many seconds of the run say nothing about how long such jobs take, such as those of a compiler. Infinity: all.
  void exclude(double seconds) noexcept { excluded_ += seconds; }
  /// The job has loaded the model of its kind, in so many seconds, which are excluded.
  void loaded(double seconds) noexcept { loaded_ = loaded_.value_or(0.0) + seconds; }
  [[nodiscard]] double excluded_seconds() const noexcept { return excluded_ + loaded_.value_or(0.0); }
  [[nodiscard]] std::optional<double> load_seconds() const noexcept { return loaded_; }

 private:
  std::vector<const Device*> devices_;
  std::vector<Stream*> streams_;
  std::vector<Eviction> evicted_;
  double excluded_ = 0.0;
  std::optional<double> loaded_{};
};

namespace internal {
class JobState;
class PoolCore;
}  // namespace internal

/// A job that others may come after (JobOptions::after). Every Future converts to one.
struct JobHandle {
  JobId id{};
  std::shared_ptr<const internal::JobState> state;
  std::weak_ptr<internal::PoolCore> pool;
};

/// How a job is submitted. Seconds count from the submit.
struct JobOptions {
  /// Jobs of one kind take about the same time on a device. The pool learns how long.
  std::string kind = "job";
  Priority priority = Priority::normal;
  double deadline_seconds = std::numeric_limits<double>::infinity();
  double not_before_seconds = 0.0;
  std::int64_t gang = 1;                  ///< on how many devices the job runs at once
  std::vector<JobHandle> after = {};      ///< jobs of this pool that must complete first
  std::vector<std::string> needs = {};    ///< labels that a device must have: its name, class, "host", "cuda"
  std::vector<std::string> devices = {};  ///< names of those that it may run on; empty: all
  double cost = 1.0;                      ///< of a request of a kind that is padded
  double memory_bytes = 0.0;              ///< what a job needs on each of its devices while it runs
  /// For whom it runs. A name that Pool::add_tenant() does not know has weight 1 and no quota.
  std::string tenant = {};
  double charge = 0.0;  ///< what its tenant is charged, whichever devices it runs on; 0: `cost` for each of them
  bool own = false;     ///< nobody asked for it, such as what warms a model: a mark in the ledger
  /// Whether submit() waits while the queue of the kind is full. Otherwise, and on every worker, the future has
  /// Rejected.
  bool wait_for_room = true;
};

/// How a kind of job runs in batches.
struct BatchOptions {
  std::int64_t max_batch = 32;     ///< the largest size; four lie between a power of two and the next one
  double max_delay_seconds = 0.0;  ///< how long a batch may wait to become larger
  bool padded = false;  ///< requests have costs, and a batch takes as long as its number of the costliest one
  double bytes_per_request = 0.0;  ///< memory that a batch needs while it runs
  /// Kinds with one model (not empty) share what it keeps in the memory of each device: `resident_bytes`, until the
  /// memory is needed (Job::evicted). The first run afterwards loads it again (Job::loaded).
  std::string model = {};
  double resident_bytes = 0.0;
};

/// What has come to a pool in some time. Work is counted in seconds that all devices together take for it.
struct PoolTick {
  double seconds = 0.0;
  double arrived_work = 0.0;
  double arrived_jobs = 0.0;
  double waiting_work = 0.0;  ///< now, of what would run if there were devices
  double runs = 0.0;          ///< in which the jobs that arrived will run; 0: nothing has run yet
  double run_work = 0.0;      ///< of those
  double run_square = 0.0;    ///< the sum of the squares of their work
  double filling = 0.0;       ///< seconds that the jobs that arrived wait for their batches to fill, in the mean
  /// False: jobs wait of a kind that no device has run yet, or submitters wait for room in the queue.
  bool known = true;
  std::vector<double> speeds = {};  ///< of each device, retired or not; 0 for a lost one. They add up to about 1
  std::vector<bool> lost = {};
  /// So many of these devices, at least, have to be active for what waits, and for what had needs lately.
  std::vector<std::pair<std::vector<bool>, std::size_t>> covers = {};
};

/// What a job left, once it has ended.
struct JobReport {
  std::string device;    ///< the name of the first device that it ran on; empty if it never ran
  double seconds = 0.0;  ///< of the run, by the worker's clock; a batch's is that of the whole batch
};

}  // namespace paceline

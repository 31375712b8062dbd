// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>

/// What goes into a pool's decisions (pool.hpp) and what comes out of them. Seconds are those of one clock, the
/// caller's.
namespace paceline::plan {

enum class JobId : std::uint64_t {};  ///< never used again; larger ones were submitted later. At most 2^22 jobs at once
enum class RunId : std::uint64_t {};  ///< one start: the jobs of a batch on a device, or a gang on several

/// How long a job without a deadline is content to wait. Jobs start in the order of submit time + patience, so a
/// patient job starves as little as any other. `background` starts only on devices for which no other job waits.
enum class Priority : std::uint8_t { interactive, normal, batch, background };

/// Which device a job runs on. `automatic`, `any` and `custom` decide when a device is free. The others decide at
/// submit.
enum class Placement : std::uint8_t {
  automatic,          ///< a slow device leaves to faster busy ones what these would end sooner
  any,                ///< whichever device is free
  round_robin,        ///< one device after the other
  least_outstanding,  ///< the one with the fewest jobs waiting and running
  weighted,           ///< in turn, in the ratio of the weights; by default the measured speeds
  earliest_finish,    ///< the one that would end it first, by the models
  custom,             ///< PoolOptions::choose
};

/// The facts of a device.
struct PoolDevice {
  std::string name = {};
  std::string device_class = {};         ///< devices of one class are taken to be alike until they are measured
  std::vector<std::string> labels = {};  ///< its name and its class are labels, too
  double weight = 0.0;                   ///< for Placement::weighted; 0: its measured speed
  double memory_bytes = std::numeric_limits<double>::infinity();  ///< of its memory space, less what others use
  std::optional<std::size_t> shares_memory_of = {};               ///< an earlier device whose memory is this one's, too
};

/// Which devices a job may run on: those that have all the labels and that `accepts` accepts. `accepts` is asked once
/// per device, so it must be a function of these facts alone.
struct PoolNeed {
  std::vector<std::string> labels = {};
  std::function<bool(const PoolDevice&)> accepts = {};
};

/// Few sizes of batches, which can all be warmed: 1 to 8, then four between a power of two and the next one, up to
/// `most`. A batch is at most a fifth smaller than planned.
[[nodiscard]] PACELINE_API std::vector<std::int64_t> batch_sizes(std::int64_t most);

/// A kind of work: a function, or one version of a model for inputs of one shape. A batch holds jobs of one kind.
struct PoolKind {
  std::string name = {};
  /// The sizes of batches that may run, ascending from 1: those that were warmed. {1}: no batches.
  std::vector<std::int64_t> sizes = {1};
  /// How long a batch may wait to become larger, from the submit time of its first job.
  double max_delay_seconds = 0.0;
  /// Jobs have costs (their lengths, for example), and a batch is padded to its costliest job: it takes the seconds of
  /// n jobs of cost 1, n its number of jobs times its largest cost. For Placement::automatic.
  bool padded = false;
  bool idempotent = false;  ///< may run again: elsewhere if its device is lost, in halves if it fails
  std::int64_t queue_limit =
      0;  ///< jobs of a tenant that wait at most; 0: eight of the largest batches for each device
  // Memory. Kinds with one `model` (not empty) share its weights.
  std::string model = {};
  double resident_bytes = 0.0;       ///< of the model's weights, from its load until it is evicted
  double reload_seconds = 0.0;       ///< to load them
  double peak_bytes = 0.0;           ///< beside the weights while it runs, whatever the size of the batch
  double peak_bytes_per_item = 0.0;  ///< with padding, of the costliest job that may come
};

/// Who shares a pool with others: a group of users, a project, a service. Tenants take the turns of a priority in the
/// ratio of their weights.
struct PoolTenant {
  std::string name = {};
  double weight = 1.0;
  // What its jobs use at once at most. A job that would exceed it waits.
  std::int64_t devices = std::numeric_limits<std::int64_t>::max();
  double memory_bytes = std::numeric_limits<double>::infinity();  ///< as its kinds say, without weights of models
};

struct PoolJob {
  std::size_t kind = 0;
  std::size_t need = 0;  ///< from PoolState::add_need; 0: any device
  Priority priority = Priority::normal;
  double deadline_seconds = std::numeric_limits<double>::infinity();  ///< from submit
  double not_before_seconds = 0.0;                                    ///< from submit
  double cost = 1.0;                                                  ///< of a job of a padded kind
  std::int64_t gang = 1;                                              ///< devices that it runs on at once
  std::size_t tenant = 0;  ///< from PoolState::add_tenant; 0: whoever has no name
  double charge = 0.0;     ///< what its tenant is charged, whichever devices it runs on; 0: `cost` for each of them
  bool own = false;        ///< nobody asked for it, such as what warms a model; for who reads a ledger, decides nothing
  bool waits = false;      ///< its submit waits while the queue is full; for who reads a ledger, decides nothing
  /// Jobs that must complete first. A pool forgets a job that has ended, and takes it here as completed: the caller,
  /// who holds its future, does not submit what depends on a failure.
  std::vector<JobId> after = {};
};

enum class JobOutcome : std::uint8_t { completed, failed, rejected, expired, cancelled };

/// Why a job ended other than by running, or why an idle device left jobs waiting.
enum class PoolReason : std::uint8_t {
  none,
  queue_full,        ///< rejected: of its kind, or of the pool
  deadline,          ///< rejected: it or another one would be late; expired: it cannot end in time; declined: not here
  no_device,         ///< rejected: too few devices satisfy its need, have the memory and are not lost
  on_request,        ///< cancelled
  dependency,        ///< cancelled: what it waited for did not complete
  error,             ///< failed by itself
  out_of_memory,     ///< failed
  device_lost,       ///< failed
  faster_devices,    ///< declined: busy faster devices will have ended it sooner
  filling,           ///< declined: max_delay_seconds
  reserved,          ///< declined: the device waits for a gang, and the job would end after the gang's start
  memory,            ///< declined: the model does not fit beside what runs
  foreground,        ///< declined: background work waits while other work waits for the device
  chosen_otherwise,  ///< declined: by PoolOptions::choose
  quota,             ///< rejected: alone more than its tenant's quota; declined: until less of the tenant's runs
};

/// One candidate for a job, as PoolOptions::choose sees it.
struct PoolCandidate {
  std::size_t device = 0;
  std::string_view name = {};
  bool idle = false;
  double free_in_seconds = 0.0;  ///< predicted; 0 for an idle device
  double seconds = 0.0;          ///< predicted for one such job there, of typical cost; infinity if unknown
};

/// What PoolOptions::choose is asked: where the job that is next of its kind shall start.
struct PoolQuestion {
  double now_seconds = 0.0;
  JobId job{};
  std::size_t kind = 0;
  std::string_view kind_name = {};
  Priority priority = Priority::normal;
  double deadline_seconds = std::numeric_limits<double>::infinity();  ///< from now; infinity: none
  std::int64_t waiting = 0;                                           ///< jobs like it, itself included
  std::span<const PoolCandidate> candidates{};  ///< all devices that may run it, the fastest first
};

struct PoolOptions {
  Placement placement = Placement::automatic;
  /// With Placement::custom: the idle device on which the job starts, or none to let it wait. A pure function. A Pool
  /// asks it as Pool says.
  std::function<std::optional<std::size_t>(const PoolQuestion&)> choose = {};
  /// How many times the gain of faster devices the waiting jobs must outnumber. Simulated on boxes of 2 to 4 devices,
  /// 0.5 was within 18 % of the best mean and 24 % of the best p99 in every case; 0 lost up to 11.8 times in p99.
  double decline = 0.5;
  double probe_seconds = 5.0;  ///< a device that has declined so long gets one job without a deadline
  std::int64_t samples = 3;    ///< of each device class, before devices decline
  /// Actual over predicted seconds that deadlines allow for until ten runs of a kind have ended. Then it is the 90 %
  /// quantile of the last runs.
  double margin = 1.3;
  double memory_margin_bytes = 0.0;                       ///< kept free in every memory
  std::vector<double> patience = {0.1, 1.0, 60.0, 60.0};  ///< seconds, by Priority
};

/// A model whose weights leave the memory of a device.
struct PoolEviction {
  std::size_t device = 0;
  std::string model = {};
};

/// Start these jobs as one batch: evict, load, run.
struct PoolStart {
  RunId run{};
  std::vector<std::size_t> devices = {};  ///< one, or as many as the gang has
  std::vector<JobId> jobs = {};
  std::size_t kind = 0;
  double cost = 0.0;  ///< what the model's seconds are of: the number of jobs, if padded times the largest cost
  double predicted_seconds = 0.0;        ///< without the load; NaN if unknown
  double load_seconds = 0.0;             ///< > 0: load the kind's model first
  std::vector<PoolEviction> evict = {};  ///< before the load
  bool probe = false;                    ///< only to see whether the device is still slow
};

/// The end of a job that ends now.
struct PoolEnd {
  JobId job{};
  JobOutcome outcome = JobOutcome::completed;
  PoolReason reason = PoolReason::none;
  std::optional<JobId> cause = {};  ///< the job on which it depended
};

/// An idle device that leaves jobs waiting.
struct PoolDecline {
  std::size_t device = 0;
  std::size_t kind = 0;
  PoolReason reason = PoolReason::none;
  double waiting = 0.0;    ///< jobs of this kind, and others in units of its seconds
  double threshold = 0.0;  ///< with faster_devices: it takes a job when more than this many wait
};

/// What an event leads to. The caller does it all, in this order: ends, then starts.
struct PoolDecisions {
  std::vector<PoolEnd> ends = {};
  std::vector<PoolStart> starts = {};
  std::vector<PoolDecline> declines = {};  ///< of the devices that are still idle
  /// Deadlines need released devices that they did not need before: PoolState::covers() names them. Or what waits
  /// begins to take too long: PoolState::want_above(). In no ledger.
  bool wants_devices = false;
  /// When PoolState::tick must be called if nothing else happens before; infinity: never.
  double wake_seconds = std::numeric_limits<double>::infinity();
};

/// What a tenant has, and has had.
struct PoolTenantUse {
  PoolTenant tenant = {};
  double served = 0.0;       ///< the charges of its jobs that ran, each once, since the pool has tenants
  std::int64_t waiting = 0;  ///< jobs
  std::int64_t devices = 0;  ///< at which its jobs run
  double memory_bytes = 0.0;
};

/// What comes of a kind, in jobs of typical cost. A gang counts for each of its devices.
struct PoolLoad {
  /// Since the kind was added, from when they could run, with those that were rejected for the queue or their deadline,
  /// and with those that were cancelled since. Those of a tenant with a quota count once they
  /// start, or are rejected or expire though the quota has room. A quota of as many devices as there are is none.
  double arrived = 0.0;
  double waiting = 0.0;  ///< that would start if there were devices: as many as quotas let run
  /// A second, of each device in its largest batches, also if it is retired. A device that has run none counts as the
  /// mean of the others. 0: no device has, it cannot, or it is lost.
  std::vector<double> rates = {};
  /// Of a run, in the mean of the last ones: its jobs, its work over that of a job in a largest batch, and the square
  /// of this. One that hung counts as ten. 0: none has run.
  double run_jobs = 0.0;
  double run_work = 0.0;
  double run_square = 0.0;
};

/// Jobs of one kind that wait because too few of the devices that may run them are active.
struct PoolShortage {
  std::size_t kind = 0;
  std::int64_t gang = 1;
  std::int64_t active = 0;             ///< devices that may run them
  std::vector<std::size_t> away = {};  ///< devices that may run them, and are retired
  std::int64_t jobs = 0;
};

/// So many of these devices, at least, have to be active.
struct PoolCover {
  std::vector<bool> devices = {};
  std::size_t count = 1;
};

/// How a run ended. `given_up`: nobody waits for it any more, so its jobs fail, and run nowhere again.
enum class RunResult : std::uint8_t { completed, failed, out_of_memory, device_lost, given_up };

}  // namespace paceline::plan

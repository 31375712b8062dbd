// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/pool_types.hpp>

namespace paceline::plan {

/// The state of a pool and its decisions: independent jobs on unequal devices, placed, batched and ordered by predicted
/// seconds. Pure: no clock, thread, device or randomness is inside. The caller says what happened and when, and does
/// what the decisions say. So an engine, a simulation and a replay decide alike. Times must not decrease.
///
/// Order: each job has one key, its deadline, or without one its submit time + the patience of its priority. The
/// smallest key is offered to the fastest idle device first. Nothing is bound to a device before it runs there, unless
/// the placement says so.
///
/// Deadlines: a job is rejected at submit if by predicted seconds it cannot end in time, or one that was taken would be
/// late because of it. So what was taken does not expire while runs take as long as predicted. That is not promised
/// beside gangs, batches, quotas, jobs that are held back or run again, devices that go or come late, more than 1024
/// waiting jobs of a kind, or with another placement than automatic and any. A gang, a job of a kind with batches, and
/// one that is bound at submit are taken if they can end in time after what is served before them. A batch leaves out
/// jobs whose deadlines would make it so small that more jobs in all are late (early drop, without padding).
///
/// Placement::automatic: an idle device j with n waiting jobs declines while n <= decline * Σ (s_j / s_e - 1) over the
/// faster busy devices e, s the predicted seconds of this kind of job on a device, with the load of its model. The
/// fastest device never declines. Other kinds count in n by their seconds. Source of the rule: Agrawala, Coffman, Garey
/// & Tripathi, IEEE TSE 1984, scaled for arrivals that go on.
///
/// Batches: T is the least time in which all devices, each from when it is free, serve all that waits in their largest
/// batches. An idle device takes what it can end by T, in a size of the kind, or declines if that is nothing.
///
/// Padding: where a batch takes as long as its number of jobs times its costliest one, an idle device looks at the next
/// jobs, four times as many as it can take, cuts them into batches of like costs with the least seconds in sum, and
/// takes the one with the first job. T counts a waiting job by its own cost.
///
/// Tenants: a priority has as many turns, and as early ones, as without tenants. Which tenant takes a turn is decided
/// by start-time fair queueing (Goyal, Vin & Cheng, 1997) in units of charge, one queue for each priority and set of
/// devices that jobs may run on; the tenant gives it to its job with the smallest key. Which of the sets is next, where
/// they share devices, is decided in the same way, in a queue of all. A queue is full for one tenant at a time.
/// A tenant whose tag is larger than that of a batch's first job, and than that of somebody who waits elsewhere (for
/// another kind or need, or with a gang), fills the batch up: behind the others, and charged only among those who fill
/// up batches of this line. So of two tenants whose jobs, of the same kinds and needs, wait all the time, what they
/// were served over their weights differs by at most l1 / w1 + l2 / w2, if the two have no quotas, deadlines and gangs,
/// without padding, and if the placement decides when a device is free. l is what one job charges at most, or where
/// somebody waits elsewhere, what one start charges, for each set of devices, and one job more for each kind and need.
/// Before a tenant that comes each other one starts at most once, if the comer was not served lately. Otherwise the
/// other one may also be charged, over its weight, as much as the comer's last start was charged over the comer's.
/// The proof is in tenants.cpp: tags stay between the virtual time and one start later.
/// What runs again is charged once. Who waits for a device that others cannot use, or for its quota, saves up no turns.
/// A job with a deadline keeps its key, and its charge delays what its tenant has without deadlines. A batch may hold
/// jobs of several tenants. A job of a tenant with a quota holds up nobody until its patience is over, and then only
/// later ones of its tenant, which start if the quota has room for this job beside them.
///
/// A value type: a copy is an independent pool. Not safe for threads. A decision is O(kinds that wait * (devices +
/// their tenants that wait)), with up to 16 gangs of each tenant as kinds of their own, and O(sqrt(waiting jobs)) moves
/// of small records. A batch that an idle device looks at is O(their kind's tenants that wait + its jobs * the
/// logarithm of these). With padding a decision is also O(jobs that it looks at * sizes), and an insertion moves some
/// of these jobs' small records. A submit with a deadline is also O(devices * jobs that wait, at most 1024 of a line
/// with deadlines and 1024 without).
///
///     PoolState pool;
///     (void)pool.add_device(0.0, {.name = "cuda:0", .device_class = "H100"});
///     const std::size_t kind = pool.add_kind({.name = "score"});
///     JobId job{};
///     for (const PoolStart& start : pool.submit(0.0, {.kind = kind}, job).starts) { /* run start.jobs */ }
class PACELINE_API PoolState {
 public:
  /// @throws InvalidArgument if an option is not valid.
  explicit PoolState(PoolOptions options = {});
  PoolState(const PoolState& other);
  PoolState& operator=(const PoolState& other);
  PoolState(PoolState&&) noexcept;
  PoolState& operator=(PoolState&&) noexcept;
  ~PoolState();

  /// Devices, kinds, needs and tenants are numbered from 0 in the order in which they were added. Need 0 exists: any
  /// device. So does tenant 0, who has no name, weight 1 and no quota. A kind takes the number of one that is
  /// forgotten.
  std::size_t add_kind(PoolKind kind);
  std::size_t add_tenant(PoolTenant tenant);
  /// Frees what is kept for a kind, and for its model if no other kind has it: it counts as evicted. False: jobs of the
  /// kind wait or run.
  bool forget(std::size_t kind);
  /// A device no longer keeps a model, which counts as evicted. False: it is not there, or a batch of it runs there.
  bool unload(std::size_t device, const std::string& model);
  std::size_t add_need(PoolNeed need);
  PoolDecisions add_device(double now_seconds, PoolDevice device);

  /// A job. `id` is set before anything is decided, so that it is known in the decisions: the job may start or be
  /// rejected at once. A job that is to wait for room calls has_room() first.
  /// @throws InvalidArgument if the job is not valid; the message says why.
  PoolDecisions submit(double now_seconds, const PoolJob& job, JobId& id);
  [[nodiscard]] bool has_room(std::size_t kind, std::size_t tenant = 0) const;

  /// A run ended; its devices are free. `seconds` is what the work took by the devices' own timing, without the load
  /// of the model; it counts if the run completed. A failed batch of an idempotent kind runs again in halves, so that
  /// only the job fails that is the reason. Out of memory halves the device's largest batch of this kind and retries.
  PoolDecisions finish(double now_seconds, RunId run, RunResult result, double seconds);

  /// Takes a run back that its device has not begun: its jobs wait again, each as before. `cancelled`: one of them,
  /// which ends instead, with what depends on it. Evictions and loads of the start count as done.
  PoolDecisions withdraw(double now_seconds, RunId run, std::optional<JobId> cancelled = {});

  /// A job that waits is cancelled, and what depends on it. One that runs or has ended is not: `cancelled` is false.
  PoolDecisions cancel(double now_seconds, JobId job, bool& cancelled);

  /// The device starts nothing until it is restored. What runs there goes on. `paused`: for a moment only, so as many
  /// jobs may wait as before. `activation_seconds`: the device is restored so long after covers() names it, without the
  /// load of a kind's model; so jobs whose deadlines it keeps then are taken and wait for it. Infinity: for no
  /// deadline.
  PoolDecisions retire(double now_seconds, std::size_t device, bool paused = false,
                       double activation_seconds = std::numeric_limits<double>::infinity());
  PoolDecisions restore(double now_seconds, std::size_t device);
  /// Retires the device for good: jobs that only it could run fail, and are rejected from now on. restore() takes it
  /// back all the same.
  PoolDecisions lose(double now_seconds, std::size_t device);

  /// A new model of the seconds of a kind on a device, made from `samples` runs. Devices of the same class that have no
  /// model of their own use it, too.
  PoolDecisions measure(double now_seconds, std::size_t device, std::size_t kind, const CostModel& model,
                        std::int64_t samples);

  /// The model of a kind was loaded in so many seconds: its reload_seconds from now on.
  PoolDecisions loaded(double now_seconds, std::size_t kind, double seconds);

  /// Time has passed: deadlines, starts that had to wait, batches that are filled up no longer.
  PoolDecisions tick(double now_seconds);

  /// From now on decisions want devices, too, when what waits begins to take active devices longer than this, while
  /// released ones could help. In no ledger.
  void want_above(double wait_seconds) noexcept;

  /// From now on each event and what was decided goes to `out`, as pool_ledger.hpp says. A copy of the pool writes
  /// none.
  /// @throws InvalidArgument once something was decided: a ledger that lacks events cannot be replayed.
  void write_to(std::shared_ptr<std::ostream> out);
  [[nodiscard]] bool writes_ledger() const noexcept;
  /// Whether a line could not be written. None is written after it.
  [[nodiscard]] bool ledger_failed() const noexcept;

  // What is known.
  /// Whether anything but additions has happened.
  [[nodiscard]] bool begun() const noexcept;
  [[nodiscard]] const PoolOptions& options() const noexcept;
  [[nodiscard]] std::size_t device_count() const noexcept;
  [[nodiscard]] const PoolDevice& device(std::size_t device) const;
  [[nodiscard]] bool active(std::size_t device) const;
  [[nodiscard]] bool idle(std::size_t device) const;
  [[nodiscard]] std::size_t kind_count() const noexcept;
  [[nodiscard]] const PoolKind& kind(std::size_t kind) const;
  [[nodiscard]] std::int64_t waiting() const noexcept;  ///< jobs that do not run: with those not due, and gangs
  [[nodiscard]] std::int64_t running() const noexcept;  ///< runs
  [[nodiscard]] double margin(std::size_t kind) const;  ///< actual over predicted seconds that deadlines allow for
  /// The largest batch of a kind on a device, by its memory; 0: it cannot run there.
  [[nodiscard]] std::int64_t largest_batch(std::size_t kind, std::size_t device) const;
  /// Predicted seconds of a batch there, without a load; NaN if unknown. `cost` is as in PoolStart.
  [[nodiscard]] double seconds(std::size_t kind, std::size_t device, double cost) const;
  [[nodiscard]] bool resident(std::size_t device, const std::string& model) const;
  /// The weights in the device's memory, and the peaks of what runs there.
  [[nodiscard]] double used_bytes(std::size_t device) const;
  /// The seconds until all that waits now would be served: the figure to scale on. Unknown kinds count as nothing, and
  /// so do jobs of Priority::background, for which nothing else waits.
  [[nodiscard]] double backlog_seconds() const;
  /// Of each kind; all zero where a number is free.
  [[nodiscard]] std::vector<PoolLoad> loads() const;
  /// What has to stay active, or to come back, for jobs that wait now, and for needs that jobs have had since then.
  /// Where deadlines of waiting jobs need more devices than are active: released ones that keep them. Of the jobs of a
  /// kind, need and class that have deadlines the next 64 count, and of all gangs the next 16. A job behind these was
  /// taken as if its device was called at once. It is called later, so the job may expire. None is refused for that.
  [[nodiscard]] std::vector<PoolCover> covers(double since_seconds) const;
  [[nodiscard]] std::vector<PoolShortage> shortages() const;
  [[nodiscard]] bool lost(std::size_t device) const;
  /// By their numbers.
  [[nodiscard]] std::vector<PoolTenantUse> tenants() const;
  /// A sentence for a report.
  [[nodiscard]] std::string describe(const PoolDecline& decline) const;
  [[nodiscard]] std::string describe(const PoolShortage& shortage) const;

  class State;  // private to the library

 private:
  std::unique_ptr<State> state_;
};

}  // namespace paceline::plan

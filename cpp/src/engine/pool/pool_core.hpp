// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/plan/pool.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "engine/pool/job_queue.hpp"
#include "engine/pool/pool_clock.hpp"
#include "engine/pool/user_placement.hpp"
#include "plan/line_fit.hpp"

namespace paceline::internal {

class AddedDevice;
class PoolCore;

/// While it lives, the calling thread runs a job of the pool or tells how its jobs ended.
class Inside {
 public:
  explicit Inside(const PoolCore& pool) noexcept;
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  /// Whether the calling thread runs a piece of work on a device, or tells how jobs of a pool ended.
  [[nodiscard]] static bool any() noexcept;
  /// Whether it does so for this pool.
  [[nodiscard]] static bool of(const PoolCore& pool) noexcept;

 private:
  const PoolCore& pool_;
  const Inside* outer_;
};

inline constexpr double kNever = std::numeric_limits<double>::infinity();  // seconds
inline constexpr double kRunsKept = 0.9;                                   // in the times of runs: some ten count
inline constexpr const char* kJobOnRequest = "The job was cancelled before it began.";
inline constexpr const char* kJobOfClosedPool = "The job was cancelled: its pool was closed.";
inline constexpr const char* kJobDependency =
    "The job was cancelled, since a job that it comes after did not complete.";

/// The error of a job that comes after one with this error.
[[nodiscard]] std::exception_ptr cancelled_after(const std::exception_ptr& cause);

/// Why jobs end. With a run: its own jobs. Without: all that fail or are cancelled.
struct RunEnding {
  plan::RunId run{};
  std::exception_ptr error;
  JobReport report;
};

/// Does what plan::PoolState decides: a source that gives each worker the run that was decided for its device, and
/// tells jobs how they ended.
///
/// Everything is under one mutex but the runs themselves and the ends of jobs, which may submit again.
class PoolCore final : public WorkSource, public std::enable_shared_from_this<PoolCore> {
 public:
  PoolCore(const DeviceGroup& group, plan::PoolOptions options, double budget,
           const std::map<std::string, double>& memory_bytes);
  ~PoolCore() override;

  /// Whether this is the child of the process that made the pool, which has none of its workers.
  [[nodiscard]] bool forked() const noexcept;

  /// @throws InvalidArgument if the pool has the device, or for such a limit; Unavailable once closed
  void check_new(const std::string& device, double memory_bytes) const;
  /// One more device, whose worker asks `source` and `live`. `queue`: as JobQueue::of(). @throws as check_new()
  void add(const paceline::Device& device, double memory_bytes, std::unique_ptr<JobQueue> queue,
           const std::shared_ptr<AddedDevice>& source, AddedDevice& live);
  /// The stream of a GPU; null for a host device. It ends with release(), or with the pool.
  [[nodiscard]] Stream* stream(const std::string& device) const;
  /// Once complete: gives the streams back.
  void release() noexcept;
  void add_batches(const std::string& kind, const BatchOptions& options, Pool::BatchCall call);
  void add_tenant(plan::PoolTenant tenant);
  [[nodiscard]] std::vector<plan::PoolTenantUse> tenants() const;
  bool forget(const std::string& kind);
  bool unload(const std::string& device, const std::string& model);
  JobId submit(std::unique_ptr<PoolCall> call, const JobOptions& options);
  bool cancel(JobId id);
  /// `unless_last`: not if no other device is active. `released`: as many jobs may wait as before, and deadlines count
  /// on the device. Returns whether it did.
  bool retire(const std::string& device, bool retired, bool unless_last = false, bool released = false,
              double activation_seconds = 0.0);
  void on_wants_devices(std::function<void()> call, double wait_seconds);
  /// See Pool.
  void visit_runs_over(double seconds, const Pool::Visit& visit) const;
  bool give_up(plan::RunId run, const std::exception_ptr& error);
  /// Time has passed, by `clock_`: ends what waits for too long, and starts what had to wait.
  void tick() noexcept;
  /// Takes no more jobs. `cancel`: ends those that wait.
  void close(bool cancel) noexcept;
  /// Once complete: whether every worker has let go of it, within a moment. One that is busy with work of others has
  /// not.
  [[nodiscard]] bool let_go();
  /// Once complete: until no thread is in the user's placement.
  void wait_for_placement();
  [[nodiscard]] std::int64_t waiting() const;
  [[nodiscard]] std::int64_t running() const;
  [[nodiscard]] std::vector<std::string> active() const;
  [[nodiscard]] double backlog_seconds() const;
  [[nodiscard]] std::optional<PoolTick> scale_tick(double least_seconds, double keep_seconds);
  [[nodiscard]] std::string explain(const Pool::Counts& counts) const;
  void write_ledger(const std::filesystem::path& path);

  NextWork next(DeviceId device, Clock::time_point now) noexcept override;
  /// The same for the device at this place, whose worker asks that source.
  [[nodiscard]] NextWork next_at(std::size_t place, const WorkSource& asked) noexcept;
  /// For a device at whose worker a step may have work: only a job with a short patience, within the budget.
  [[nodiscard]] NextWork next_live(std::size_t place, const WorkSource& asked) noexcept;
  void perform(DeviceId device, std::int64_t work, Turn& turn) override;
  void done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept override;
  void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept override;
  void cancel(std::exception_ptr reason) noexcept override;
  [[nodiscard]] bool complete() const noexcept override { return complete_.load(std::memory_order_acquire); }
  [[nodiscard]] double budget() const noexcept { return budget_; }

 private:
  struct Kind {
    std::string name;
    Pool::BatchCall call;             // empty: its jobs run alone
    std::deque<plan::LineFit> times;  // of runs, per device
  };
  struct Waiting {
    std::shared_ptr<PoolCall> call;
    plan::RunId run{};         // that it is in, if any
    bool live = false;         // whether it may take time from steps
    double deadline = kNever;  // by the pool's clock
  };
  struct Run {
    std::vector<std::size_t> devices;
    std::vector<JobId> jobs;
    std::vector<PoolCall*> calls;
    std::size_t kind = 0;
    double cost = 0.0;         // what its seconds are of
    double predicted = 0.0;    // seconds; NaN if unknown
    double begin_by = kNever;  // when it would be too late for one of its jobs
    bool live = false;         // whether one of its jobs is
    bool taken = false;
    bool lent = false;                     // whether a step was there when it was taken, so that the budget counts it
    const WorkSource* taken_by = nullptr;  // that its worker asked; null once it is done with it
    bool enqueued = false;                 // its worker is done with it, but perhaps not the GPU
    std::exception_ptr error = {};         // of an enqueued run whose call has thrown
    Clock::time_point began{};             // by the worker
    double excluded = 0.0;                 // seconds that do not count; infinity: none does
    std::optional<double> loaded{};        // seconds of loading the model of its kind
    // Of a run that was given up: what it uses of GPUs, and its calls, which have ended and go first.
    std::vector<std::unique_ptr<JobQueue>> queues{};
    std::vector<std::shared_ptr<PoolCall>> kept{};
  };
  struct Device {
    paceline::Device facts;
    std::unique_ptr<JobQueue> queue = nullptr;  // of a GPU
    DeviceId id{};                              // by which its worker is woken, if it was there at the start
    std::weak_ptr<AddedDevice> source = {};     // otherwise what wakes it
    std::optional<plan::RunId> run = {};        // a gang's is that of its first device
    bool retired = false;                       // by the user, or released
    bool released = false;
    bool lost = false;
    bool blocked = false;   // by the budget: what waits for the device may start on others, or expire
    std::int64_t runs = 0;  // that completed, as their jobs
    std::int64_t jobs = 0;
    double seconds = 0.0;                            // of all runs
    double lent_seconds = 0.0;                       // of them, those that a step may have waited for
    double spent_seconds = 0.0;                      // the same, less what the budget has given since
    double spent_until = 0.0;                        // when that was
    std::optional<plan::PoolDecline> declined = {};  // what it leaves alone now
    std::vector<std::string> evict = {};             // models that the next run there lets go of first
    /// Why it takes no work, for a text.
    [[nodiscard]] const char* away() const noexcept {
      if (lost) return "; lost";
      if (blocked) return "; waits for the budget";
      return retired ? (released ? "; released" : "; retired") : "; closed";
    }
  };
  struct Ended {
    std::shared_ptr<PoolCall> call;
    JobReport report;
    std::exception_ptr error;
  };
  /// What follows from an event, once the mutex is free.
  struct After {
    std::vector<Ended> ended;
    std::vector<const Device*> wake;
    bool wake_all = false;
    bool room = false;
    double ring = kNever;                      // when to call tick(), if that is sooner than before
    std::function<void()> wants_devices = {};  // whom to tell that released devices are needed
  };

  [[nodiscard]] plan::PoolDecisions place(Device device, double memory_bytes);
  [[nodiscard]] std::size_t place_of(const std::string& device, const char* call) const;
  void set_run(Waiting& job, plan::RunId run) noexcept;
  [[nodiscard]] NextWork take(Run& run, plan::RunId id, bool lent, const WorkSource& asked) noexcept;
  /// Seconds until the device may take time from steps again; 0: it may now.
  [[nodiscard]] double until_budget(Device& device) const noexcept;
  /// Takes back what the budget keeps from the device, and gives it nothing until unblock().
  void block(std::size_t place, After& after);
  void unblock(std::size_t place, After& after);
  /// Whether the GPU is still at a run whose call has returned, or thrown this.
  [[nodiscard]] bool is_enqueued(std::int64_t work, const std::exception_ptr& error) noexcept;
  /// Ends the device's run if the GPU has done it. The event to wait for if it has not.
  [[nodiscard]] const Event* settle(std::size_t place) noexcept;
  /// Lets go of what runs used that were given up, where the GPUs have done it. Returns it, to be destroyed without the
  /// lock.
  [[nodiscard]] std::vector<Run> forget_given_up() noexcept;
  void wake(const Device& device) noexcept;
  void wake_everyone() noexcept;
  [[nodiscard]] double now() const;  // of the pool's clock; under the mutex, so that times do not decrease
  /// The moment after that time of the pool's clock.
  [[nodiscard]] Clock::time_point at(double seconds) const noexcept;
  /// The kind of a job that is not served: those that need other memory are measured apart.
  [[nodiscard]] std::size_t kind_of(const JobOptions& options, bool batched);
  void keep_kind(std::size_t kind, std::string name, Pool::BatchCall call);
  [[nodiscard]] std::size_t tenant_of(const std::string& name);
  [[nodiscard]] std::size_t need_of(const JobOptions& options);
  /// Why no device can run it, or the quota of its tenant never lets it.
  [[nodiscard]] std::exception_ptr no_device(const JobOptions& options, std::size_t kind) const;
  [[nodiscard]] std::exception_ptr over_quota(const JobOptions& options, const plan::PoolJob& job) const;
  /// Returns whether it had to.
  bool wait_for_room(std::unique_lock<std::mutex>& lock, std::size_t kind, std::size_t tenant);
  void apply(plan::PoolDecisions decisions, After& after, const RunEnding& ending = {});
  /// Lets `clock_` call tick() when that is due or by this time, once it has started. Before, idle workers look at the
  /// time.
  void keep_time(After& after, double by) noexcept;
  /// Ends what no worker has begun, and starts nothing any more.
  void end_waiting(const std::exception_ptr& error, After& after);
  /// Takes a run back that no worker has begun. `cancelled`: one of its jobs, which ends.
  void withdraw(plan::RunId run, std::optional<JobId> cancelled, After& after, const RunEnding& ending = {});
  /// Takes back what no worker has begun on a device that starts nothing any more.
  void vacate(std::size_t place, After& after, const RunEnding& ending = {});
  /// A job has reported a device of its run as lost.
  void lose(const Run& run, const std::exception_ptr& error, After& after);
  void check_process(const char* call) const;
  /// `asks`: calls place_by_user() if a decision wants it.
  void follow(After after, bool asks = true) noexcept;
  /// See UserPlacement::begin().
  [[nodiscard]] bool begin_to_ask();
  /// Asks the user's placement what the decisions wanted to know, and decides with its answers.
  void place_by_user() noexcept;
  /// `timed`: the seconds by the worker, of a run that completed.
  void finish(std::int64_t work, plan::RunResult result, std::optional<double> timed,
              const std::exception_ptr& error) noexcept;
  [[nodiscard]] std::exception_ptr error_of(const plan::PoolEnd& end, const std::exception_ptr& thrown) const;

  DeviceGroup group_;
  const double budget_;
  std::atomic<int> live_{0};          // runs that no worker has begun, and that may take time from steps
  std::atomic<int> waiting_live_{0};  // such jobs that are in no run
  std::atomic<bool> gpus_{false};     // whether a device may be at a run whose call has returned
  const pid_t owner_ = getpid();
  const Clock::time_point begin_ = Clock::now();
  mutable std::mutex mutex_;
  std::condition_variable room_;  // a queue has room, or a worker has let go
  UserPlacement placement_;       // state_ asks it
  plan::PoolState state_;
  std::map<std::pair<std::string, double>, std::size_t> kinds_;  // by name, and the memory of a job
  std::map<std::pair<std::vector<std::string>, std::vector<std::string>>, std::size_t> needs_;
  std::unordered_map<std::string, std::size_t> tenants_{{"", 0}};
  std::deque<Kind> kind_list_;               // a run refers to its kind
  std::unordered_map<JobId, Waiting> jobs_;  // that have not ended
  std::unordered_map<plan::RunId, Run> runs_;
  std::unordered_map<plan::RunId, Run> given_up_;  // that go on
  std::deque<Device> devices_;                     // jobs refer to the facts
  double wake_seconds_ = kNever;                   // when the decisions are due again
  double rings_at_ = kNever;                       // when clock_ calls next
  PoolClock clock_;                                // started by the first job that has a deadline or a start
  std::size_t ending_ = 0;                         // jobs that have ended and are being told
  std::size_t let_go_ = 0;                         // workers
  bool closed_ = false;
  bool cancelling_ = false;  // whether nothing starts any more
  // Of scale_tick(): when it was last called, what had come of each kind by then, and the speeds that it told.
  double ticked_ = 0.0;
  bool wants_devices_ = false;  // since then
  std::function<void()> on_wants_devices_;
  int submitters_ = 0;  // that wait for room
  std::vector<double> arrived_;
  std::vector<double> speeds_;
  std::exception_ptr lost_;  // why the last device was lost, if all are
  std::atomic<bool> complete_{false};
};

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "plan/pool/deadlines.hpp"
#include "plan/pool/job_slots.hpp"
#include "plan/pool/ledger.hpp"
#include "plan/pool/line.hpp"
#include "plan/pool/padding.hpp"
#include "plan/pool/size_times.hpp"
#include "plan/pool/tenants.hpp"

namespace paceline::plan {

inline constexpr std::size_t kGangsAsked = 16;   // of those that wait: the others have larger keys, and start later
inline constexpr std::int64_t kTimedAsked = 64;  // the same of jobs with deadlines in a line: see PoolState::covers()

inline bool finite_not_negative(double value) { return std::isfinite(value) && value >= 0.0; }

/// The largest of the sizes that is not above `most`; 0 if there is none.
inline std::int64_t size_within(const std::vector<std::int64_t>& sizes, std::int64_t most) {
  const auto above = std::upper_bound(sizes.begin(), sizes.end(), most);
  return above == sizes.begin() ? 0 : *(above - 1);
}

class PoolState::State {
 public:
  using Job = PoolEntry;
  struct Run {
    std::vector<std::size_t> devices = {};
    std::vector<JobId> jobs = {};
    std::size_t kind = 0;
    double predicted = 0.0;
    double peak_bytes = 0.0;
    bool bound = false;
    std::vector<std::pair<std::size_t, std::int64_t>> shares = {};  // jobs of each tenant, once they were counted
  };
  struct Device {
    PoolDevice spec = {};
    std::size_t cls = 0;
    std::size_t space = 0;
    bool active = true;
    bool lost = false;              // and retired
    bool paused = false;            // and retired, for so short that as many jobs may wait
    double activation = kNever;     // seconds, if it is released: retired, and comes back when a deadline needs it
    double counted_since = kNever;  // when a job that waits first needed it back
    RunId run{};                    // 0: idle
    Run current = {};               // of run, if this is its first device
    double free_at = 0.0;
    double declines_since = kNever;
    std::int64_t bound = 0;  // jobs bound to it, the running one included
    double turn = 0.0;       // of Placement::weighted
  };
  struct Measured {
    CostModel model = {};
    std::int64_t samples = 0;
    bool known = false;
    SizeTimes times = {};
  };
  struct Ran {
    double seconds = 0.0;
    double rate = 0.0;  // of its jobs in the largest batches, at the last run there
  };
  struct Kind {
    PoolKind spec = {};
    std::size_t model = kNone;
    std::int64_t held = 0;  // waiting jobs
    double arrived = 0.0;   // PoolLoad::arrived
    // Of its last runs, for PoolLoad: the jobs, the square of the work over that of the mean work, and by device the
    // seconds there, as a part of those of the mean run. What they are in work is known when it is asked: models
    // change.
    double run_jobs = 0.0;
    double run_variation = 0.0;
    std::vector<Ran> ran = {};
    std::int64_t runs_seen = 0;
    std::map<std::size_t, std::int64_t> held_by = {};  // tenants, if there are any
    std::vector<Measured> on = {};                     // by device
    std::vector<Measured> classes = {};
    std::vector<std::int64_t> largest = {};  // by device: the largest batch, by its memory
    std::vector<double> ratios = {};         // actual over predicted, of the last runs
    std::size_t runs = 0;
    double margin = 0.0;
    double cost = 1.0;           // of a typical job
    double mean_cost = 0.0;      // of the last jobs, if they are padded
    std::int64_t submitted = 0;  // of those
    std::uint64_t epoch = 1;
    bool forgotten = false;  // free for another one
  };
  struct Resident {
    std::size_t model = 0;
    double value = 0.0;       // GreedyDual-Size
    double peak_bytes = 0.0;  // of its largest batch
  };
  struct Space {
    double bytes = kNever;
    double level = 0.0;  // GreedyDual-Size
    std::vector<Resident> residents = {};
  };
  struct Model {
    std::string name = {};
    double bytes = 0.0;
    double reload_seconds = 0.0;
    bool loaded = false;  // whether these were measured
  };

  // Events, in pool.cpp and events.cpp.
  void end(JobId id, JobOutcome outcome, PoolReason reason, std::optional<JobId> cause, PoolDecisions& out);
  void release(JobId id, double now, PoolDecisions& out);
  void enqueue(Job& job, double now);
  void again(Job& job, double now);
  void unqueue(Job& job);
  void rebind(std::size_t device, double now);
  void fail_stranded(std::optional<std::size_t> kind, PoolReason reason, PoolDecisions& out);
  void ended_badly(const Run& run, RunResult result, double now, PoolDecisions& out);
  /// So many more jobs wait.
  void hold(const Job& job, std::int64_t more) {
    waiting += more;
    kinds[job.kind].held += more;
    if (has_tenants) hold_for(job, more);
  }
  [[nodiscard]] std::int64_t limit(std::size_t kind) const;
  /// Whether one more job may wait. A queue that one tenant has filled is not full for others.
  [[nodiscard]] bool has_room(std::size_t kind, std::size_t tenant) const {
    const std::int64_t most = limit(kind);
    return kinds[kind].held < most || (has_tenants && held_for(kind, tenant) < most);
  }
  void settle(double now, PoolDecisions& out);  // what every event ends with
  [[nodiscard]] bool can_run(const Job& job) const;
  void observe(Kind& kind, double ratio);
  void note_size(Kind& kind, const Run& run, double seconds);
  void typical(Kind& kind, double cost);
  void arrive(Job& job);
  void turn_away(Job& job);
  void use_need(std::size_t need, double due);
  void note_run(Kind& kind, const Run& run, double seconds);
  /// What every event ends with that is no addition.
  template <class Write>
  void note(const Write& write) {
    begun = true;
    if (ledger != nullptr) write(*ledger);
  }

  // Kinds, in kinds.cpp.
  [[nodiscard]] Kind& kind_at(std::size_t kind) {
    if (kind >= kinds.size() || kinds[kind].forgotten) refuse_kind(kind);
    return kinds[kind];
  }
  [[noreturn]] void refuse_kind(std::size_t kind) const;
  bool forget(std::size_t kind);

  // Lines and models, in lines.cpp.
  PoolLine& line_of(const Job& job, std::size_t bound);
  void activate(std::size_t line);
  void deactivate(std::size_t line);
  void put_in(PoolLine& line, Job& job) {
    if (line.size() == 0) activate(job.line);
    line.insert(job);
    if (has_tenants) join(job, &line);
  }
  void take_out(PoolLine& line, const Job& job) {
    line.erase(job);
    if (line.size() == 0) deactivate(job.line);
    if (has_tenants) leave(job, &line);
  }
  void rank(PoolLine& line);
  [[nodiscard]] bool accepts(std::size_t need, std::size_t device) const { return accepted[need][device] != 0; }
  [[nodiscard]] const Measured& measured(std::size_t kind, std::size_t device) const;
  [[nodiscard]] double seconds(std::size_t kind, std::size_t device, double cost) const;
  [[nodiscard]] std::span<const double> size_seconds(std::size_t kind, std::size_t device) const {
    return kinds[kind].on[device].known ? kinds[kind].on[device].times.seconds() : std::span<const double>{};
  }
  /// Of a job with this cost in a batch of its own.
  [[nodiscard]] double alone_seconds(const PoolLine& line, const PoolLine::Ranked& on, double cost) const {
    const std::span<const double> times = size_seconds(line.kind, on.device);
    return times.empty() ? seconds_of(on.model, cost) : times.front();
  }
  [[nodiscard]] double load_seconds(std::size_t kind, std::size_t device) const;
  [[nodiscard]] double least_seconds(const PoolLine& line, const Job& job) const;
  [[nodiscard]] double units(const PoolLine& line) const { return line.cost / kinds[line.kind].cost; }
  [[nodiscard]] double units_waiting(PoolLine& line, double faster);

  // Which device, in placement.cpp.
  [[nodiscard]] bool binds() const {  // at submit
    const Placement placement = options.placement;
    return placement != Placement::automatic && placement != Placement::any && placement != Placement::custom;
  }
  [[nodiscard]] std::size_t choose_at_submit(const Job& job, double now);

  // What starts, in dispatch.cpp.
  bool step(double now, PoolDecisions& out);
  bool start_from(PoolLine& line, double now, PoolDecisions& out);
  void start(PoolLine& line, std::size_t device, std::vector<JobId> next, JobId lead, double now, bool probe,
             PoolDecisions& out);
  [[nodiscard]] bool foreground_waits(std::size_t device);

  // Batches, in batches.cpp.
  [[nodiscard]] const Job* first_for(const PoolLine& line, const PoolLine::Ranked& on, double now) const;
  [[nodiscard]] JobId first_plain(const PoolLine& line, const PoolLine::Ranked& on, double now) const;
  [[nodiscard]] std::vector<JobId> next_jobs(const PoolLine& line, const PoolLine::Ranked& on, double now,
                                             std::int64_t size) const;
  [[nodiscard]] double looks_at(const PoolLine& line, const PoolLine::Ranked& on, double now) const;
  [[nodiscard]] std::vector<JobId> batch(PoolLine& line, const PoolLine::Ranked& on, double now, double end_by,
                                         std::optional<double> units);
  [[nodiscard]] std::span<const CostEntry> by_cost(PoolLine& line, const PoolLine::Ranked& on, double now, JobId& next);
  void cut_padded(PoolLine& line, std::span<const CostEntry> window, JobId first, std::size_t looked,
                  const CostModel& model, std::span<const std::int64_t> sizes, std::vector<JobId>& batch);
  [[nodiscard]] double cost_of(std::size_t kind, std::span<const JobId> batch) const;
  [[nodiscard]] bool early(const PoolLine& line, double seconds, double now, double units, double cost,
                           std::int64_t most) const;

  // Tenants, in tenants.cpp. If there are any:
  void share();
  void hold_for(const Job& job, std::int64_t more);
  [[nodiscard]] std::int64_t held_for(std::size_t kind, std::size_t tenant) const;
  void join(Job& job, PoolLine* line);
  void leave(const Job& job, PoolLine* line);
  double charge(const Job& job, double added, FairTags& tags);
  [[nodiscard]] std::vector<std::size_t> starters(const PoolLine& line, std::size_t cls) const;
  void pass_over(FairTags& tags, std::size_t cls, double to);
  void take_turn(const Job& job, PoolLine* line, const KeyEntry* place);
  [[nodiscard]] std::vector<std::array<bool, 3>> charged_in(std::span<const JobId> starting, const PoolLine* line,
                                                            JobId lead);
  void start_jobs(std::span<const JobId> starting, PoolLine* line, JobId lead);
  void refund(const Job& job);
  void find_sets(std::size_t from);
  /// Of jobs with this need, of all, and of those that fill up batches of its line: null for a gang, which has none.
  [[nodiscard]] std::array<FairTags*, 3> tags_of(const Job& job) {
    return {&fair[1 + sets[job.need]], &fair[0], job.gang == 1 ? &lines[job.line].fills : nullptr};
  }
  void fair_heads(double now);
  void count_use();
  [[nodiscard]] std::vector<JobId> first_gangs() const;
  void hold_back(double now);
  [[nodiscard]] bool may_start(std::size_t tenant, KeyEntry entry, std::size_t kind, std::int64_t gang,
                               std::int64_t jobs_of_batch, bool held_in_batch = false) const;
  [[nodiscard]] bool within_quota(const Job& job) const {  // alone
    const PoolTenant& tenant = tenants[job.tenant].spec;
    return job.gang <= tenant.devices && static_cast<double>(job.gang) * peak(job.kind, 1) <= tenant.memory_bytes;
  }
  [[nodiscard]] bool someone_may_start(const PoolLine& line) const;
  [[nodiscard]] bool has_quota(const Job& job) const;
  [[nodiscard]] double units_within_quotas(const PoolLine& line);
  [[nodiscard]] std::int64_t beyond_quota(std::size_t number, std::size_t kind, std::int64_t waits);
  [[nodiscard]] bool quota_holds(const Job& job);
  bool take_quota(const Job& gang);
  /// What its tenant has still to pay for it.
  [[nodiscard]] double owed(const Job& job) const {
    const std::array<bool, 3>& charged = turns[JobSlots::slot_of(job.id)].charged;
    return charged[0] || charged[2] ? 0.0 : job.charge;
  }
  [[nodiscard]] Turn& turn_of(JobId id) {
    const std::size_t slot = JobSlots::slot_of(id);
    if (slot >= turns.size()) turns.resize(slot + 1);
    return turns[slot];
  }

  // What deadlines allow, in deadlines.cpp.
  [[nodiscard]] bool admits(const Job& job, double now);
  [[nodiscard]] bool all_end(const PoolLine& own, const Job& job);  // in admission.cpp
  void expire(double now, PoolDecisions& out);
  [[nodiscard]] double wake(double now, const PoolDecisions& out);
  using CountOn = std::function<void(const std::vector<std::size_t>& released, std::int64_t more)>;
  [[nodiscard]] std::vector<PoolCover> deadline_covers(const CountOn& count_on);
  void count_on_released(PoolDecisions& out);
  [[nodiscard]] double active_wait();
  [[nodiscard]] std::vector<PoolWay> ways(const PoolLine& line, const Job& job) const;
  [[nodiscard]] std::vector<PoolWay> gang_ways(const Job& job) const;
  [[nodiscard]] std::vector<PoolWay> gang_ways(const Job& job, std::span<const double> begins) const;
  [[nodiscard]] double seconds_before(PoolLine& own, KeyEntry entry, bool by_active);
  [[nodiscard]] double last_start(const Job& job, std::span<const PoolWay> all) const;
  template <class Visit>
  void visit_timed(const PoolLine& line, const Visit& visit) const;
  [[nodiscard]] PoolWay way_of(const Device& device, double seconds = 0.0) const {
    return {device.activation, device.counted_since, seconds};
  }

  // Gangs, in gangs.cpp.
  bool gang_step(JobId id, double now, PoolDecisions& out);
  [[nodiscard]] bool can_use(const Job& job, std::size_t device) const {  // one that is active
    return devices[device].active && accepts(job.need, device) && largest(job.kind, device) > 0;
  }

  // Memory, in memory.cpp.
  [[nodiscard]] std::int64_t largest(std::size_t kind, std::size_t device) const { return kinds[kind].largest[device]; }
  void add_largest(std::size_t kind, std::size_t device);
  [[nodiscard]] double peak(std::size_t kind, std::int64_t size) const;
  [[nodiscard]] std::int64_t together(std::size_t kind, std::size_t space) const;
  [[nodiscard]] bool resident(std::size_t model, std::size_t space) const;
  [[nodiscard]] double used(std::size_t space) const;
  [[nodiscard]] std::optional<std::vector<std::size_t>> room(std::size_t kind, std::size_t device,
                                                             std::int64_t size) const;
  double take_room(std::size_t kind, std::size_t device, std::int64_t size, PoolStart& start);

  // A run is found by its first device, which the lower bits of its id name.
  static constexpr unsigned kDeviceBits = 20;
  RunId next_run(std::size_t device) { return RunId{++last_run << kDeviceBits | device}; }
  [[nodiscard]] static std::size_t first_device(RunId run) {
    return static_cast<std::uint64_t>(run) & ((std::uint64_t{1} << kDeviceBits) - 1);
  }
  [[nodiscard]] const Run& run_of(const Device& device) const { return devices[first_device(device.run)].current; }

  PoolOptions options = {};
  std::vector<Device> devices = {};
  std::vector<Kind> kinds = {};
  std::vector<PoolNeed> needs = {{}};
  std::vector<std::vector<char>> accepted = {{}};  // by need and device
  std::vector<double> needs_used = {};             // when a job last had each need, or will be due
  std::vector<std::string> classes = {};
  std::vector<Space> spaces = {};
  std::vector<Model> models = {};
  std::vector<PoolLine> lines = {};
  std::map<std::tuple<std::size_t, std::size_t, std::size_t, bool>, std::size_t> line_index = {};
  std::vector<std::size_t> active_lines = {};  // those with jobs, ascending
  std::vector<std::size_t> free_lines = {};    // of forgotten kinds
  JobSlots jobs{};
  // Tenants, the one without a name first. If there are others:
  bool has_tenants = false;
  bool quotas = false;  // whether a tenant has one
  std::vector<Tenant> tenants = std::vector<Tenant>(1);
  // One queue for all jobs, and one for those of each need, or of the first of several that the same devices satisfy:
  // the others have no tags.
  std::vector<FairTags> fair = std::vector<FairTags>(2);
  std::vector<std::size_t> sets = {0};                   // by need: that first one
  std::vector<Turn> turns = {};                          // by slot of the job
  std::set<std::tuple<bool, double, JobId>> gangs = {};  // background, key
  std::set<std::pair<double, JobId>> starts_at = {};     // held back until then
  std::set<std::pair<double, JobId>> held_deadlines = {};
  std::uint64_t last_run = 0;
  std::int64_t running = 0;  // runs
  std::uint64_t epoch = 1;   // of devices, and of what is resident
  std::int64_t waiting = 0;
  std::size_t idle = 0;         // active devices that are idle
  std::int64_t counted_on = 0;  // released devices that deadlines need back
  double most_wait = kNever;    // by active devices, before released ones are wanted
  bool behind = false;          // it is longer
  std::size_t next_turn = 0;    // of Placement::round_robin, and among equals
  double last_now = -kNever;
  bool begun = false;  // whether something was decided, or might have been
  std::shared_ptr<PoolLedger> ledger = {};

  // Of one decision: the gang that reserves.
  JobId reserving{};
  double reserved_until = 0.0;
  double hold_until = kNever;  // when a batch is filled up no longer
  std::vector<char> reserved = {};
  // Kept, so that nothing is allocated.
  PaddedCuts cuts = {};
  std::vector<double> costs = {};
  std::vector<CostEntry> walked = {};
  std::vector<std::tuple<bool, double, JobId, std::size_t>> heads = {};
};

}  // namespace paceline::plan

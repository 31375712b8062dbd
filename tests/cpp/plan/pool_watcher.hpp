// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

namespace paceline::plan::testing {

/// Follows a pool's events and decisions in books of its own, and notes what must not be. Slow and plain: it goes
/// through all jobs after every event.
class PoolWatcher {
 public:
  enum class Phase : std::uint8_t { waits, runs };
  struct Job {
    PoolJob spec;
    double deadline = std::numeric_limits<double>::infinity();
    double due = 0.0;
    double key = 0.0;
    Phase phase = Phase::waits;
    std::int64_t most = std::numeric_limits<std::int64_t>::max();
    bool probed = false;
  };

  PoolWatcher(const PoolState& pool, std::vector<PoolNeed> needs) : pool_(pool), needs_(std::move(needs)) {
    for (const PoolTenantUse& one : pool.tenants()) tenants_.push_back(one.tenant);
  }

  void submitted(double now, JobId id, const PoolJob& job) {
    Job made{job, now + job.deadline_seconds, now + job.not_before_seconds};
    const double patience = pool_.options().patience[static_cast<std::size_t>(job.priority)];
    made.key = std::isfinite(made.deadline) ? made.deadline : made.due + patience;
    jobs[id] = std::move(made);
  }
  void finished(RunId run, RunResult result) {
    const PoolStart& start = runs.at(run);
    for (const JobId id : start.jobs) {
      jobs.at(id).phase = Phase::waits;
      if (result == RunResult::failed) jobs.at(id).most = std::ssize(start.jobs) / 2;
      if (result == RunResult::completed) done_.insert(id);
    }
    finished_ = start.jobs;
    completed_ = result == RunResult::completed;
    runs.erase(run);
  }

  void withdrawn(RunId run) {
    for (const JobId id : runs.at(run).jobs) jobs.at(id).phase = Phase::waits;
    runs.erase(run);
  }

  /// What the pool decided after an event. The first thing that is wrong stands in `problem` afterwards.
  void decided(double now, const PoolDecisions& decisions) {
    for (const PoolEnd& end : decisions.ends) ended(end);
    if (completed_) {
      for (const JobId id : finished_) expect(!jobs.contains(id), "a completed job did not end");
    }
    finished_.clear();
    completed_ = false;
    for (const PoolStart& start : decisions.starts) started(now, start);
    idle_devices(now, decisions);
    strands_nothing();
    std::int64_t waiting = 0;
    for (const auto& [id, job] : jobs) waiting += job.phase == Phase::waits ? 1 : 0;
    expect(waiting == pool_.waiting(), "the pool counts other waiting jobs");
    expect(std::ssize(runs) == pool_.running(), "the pool counts other runs");
    for (std::size_t d = 0; d < pool_.device_count(); ++d) {
      expect(used(d) <= pool_.device(root(d)).memory_bytes, "more bytes than the memory has");
    }
  }

  std::map<JobId, Job> jobs;  // that have not ended
  std::map<RunId, PoolStart> runs;
  std::set<std::size_t> lost;
  std::string problem;

 private:
  void expect(bool fine, const char* what) {
    if (!fine && problem.empty()) problem = what;
  }
  [[nodiscard]] std::size_t root(std::size_t device) const {
    while (pool_.device(device).shares_memory_of) device = *pool_.device(device).shares_memory_of;
    return device;
  }
  [[nodiscard]] bool accepts(std::size_t need, const PoolDevice& device) const {
    const PoolNeed& of = needs_[need];
    for (const std::string& label : of.labels) {
      if (label != device.name && label != device.device_class && std::ranges::count(device.labels, label) == 0)
        return false;
    }
    return !of.accepts || of.accepts(device);
  }
  [[nodiscard]] bool busy(std::size_t device) const {
    return std::ranges::any_of(runs,
                               [&](const auto& run) { return std::ranges::count(run.second.devices, device) > 0; });
  }
  [[nodiscard]] bool ready(double now, const Job& job) const {
    return job.phase == Phase::waits && job.due <= now &&
           std::ranges::none_of(job.spec.after, [&](JobId one) { return jobs.contains(one); });
  }
  [[nodiscard]] double used(std::size_t device) const {
    double bytes = pool_.options().memory_margin_bytes;
    const auto found = resident_.find(root(device));
    if (found != resident_.end()) {
      for (const auto& [model, size] : found->second) bytes += size;
    }
    for (const auto& [id, run] : runs) {
      const PoolKind& kind = pool_.kind(run.kind);
      for (const std::size_t d : run.devices) {
        if (root(d) == root(device))
          bytes += kind.peak_bytes + kind.peak_bytes_per_item * static_cast<double>(run.jobs.size());
      }
    }
    return bytes;
  }

  // No job waits for devices that are lost.
  void strands_nothing() {
    if (lost.empty()) return;
    for (const auto& [id, job] : jobs) {
      std::int64_t count = 0;
      for (std::size_t d = 0; d < pool_.device_count(); ++d)
        count += lost.count(d) == 0 && accepts(job.spec.need, pool_.device(d)) ? 1 : 0;
      expect(job.phase == Phase::runs || count >= job.spec.gang, "a job waits for a lost device");
    }
  }

  void ended(const PoolEnd& end) {
    const auto found = jobs.find(end.job);
    expect(found != jobs.end(), "a job ended twice, or was never submitted");
    if (found == jobs.end()) return;
    expect(found->second.phase == Phase::waits, "a running job ended");
    expect((end.outcome == JobOutcome::completed) == (done_.count(end.job) > 0), "completed without its run");
    if (end.reason == PoolReason::dependency)
      expect(end.cause && std::ranges::count(found->second.spec.after, *end.cause) > 0, "the cause is no dependency");
    jobs.erase(found);
  }

  void started(double now, const PoolStart& start) {
    const PoolKind& kind = pool_.kind(start.kind);
    expect(!start.jobs.empty() && !start.devices.empty(), "a start of nothing");
    expect(std::ranges::count(kind.sizes, std::ssize(start.jobs)) == 1, "a size that was not warmed");
    for (const std::size_t d : start.devices) {
      expect(pool_.active(d), "a retired device started something");
      expect(!busy(d), "a busy device started something");
    }
    const Job* last = nullptr;
    for (const JobId id : start.jobs) {
      const auto found = jobs.find(id);
      expect(found != jobs.end(), "a job started that has ended");
      if (found == jobs.end()) return;
      Job& job = found->second;
      expect(job.phase == Phase::waits, "a job started that runs");
      expect(ready(now, job), "a job started before its time or its dependencies");
      expect(job.spec.kind == start.kind, "a batch of two kinds");
      expect(job.spec.gang == std::ssize(start.devices), "a gang of another size");
      expect(std::ssize(start.jobs) <= job.most, "a failed batch is not run in halves");
      for (const std::size_t d : start.devices)
        expect(accepts(job.spec.need, pool_.device(d)), "a device that the job does not accept");
      last = &job;
    }
    expect(start.cost == cost(start), "not the cost of its jobs with their padding");
    for (std::size_t tenant = 0; tenant < tenants_.size(); ++tenant) {
      const auto [devices, bytes] = use(tenant, start);
      expect(devices <= tenants_[tenant].devices && bytes <= tenants_[tenant].memory_bytes,
             "a tenant uses more than its quota");
    }
    if (start.devices.size() == 1) in_order(now, start, *last);
    for (const PoolEviction& one : start.evict) {
      expect(resident_[root(one.device)].erase(one.model) == 1, "evicted what is not there");
      for (const auto& [id, run] : runs) {
        expect(root(run.devices.front()) != root(one.device) || pool_.kind(run.kind).model != one.model,
               "evicted what runs");
      }
    }
    if (!kind.model.empty()) {
      for (const std::size_t d : start.devices) resident_[root(d)][kind.model] = kind.resident_bytes;
    }
    for (const JobId id : start.jobs) jobs.at(id).phase = Phase::runs;
    runs[start.run] = start;
  }

  // What a tenant's jobs use, with those of a run that starts.
  [[nodiscard]] std::pair<std::int64_t, double> use(std::size_t tenant, const PoolStart& start) const {
    std::pair<std::int64_t, double> sum{0, 0.0};
    const auto add = [&](const PoolStart& run) {
      const auto count = std::ranges::count_if(run.jobs, [&](JobId id) { return jobs.at(id).spec.tenant == tenant; });
      if (count == 0) return;
      const PoolKind& kind = pool_.kind(run.kind);
      sum.first += std::ssize(run.devices);
      sum.second += static_cast<double>(run.devices.size()) *
                    (kind.peak_bytes + kind.peak_bytes_per_item * static_cast<double>(count));
    };
    for (const auto& [id, run] : runs) add(run);
    add(start);
    return sum;
  }
  [[nodiscard]] bool limited(const Job& job) const {
    const PoolTenant& tenant = tenants_[job.spec.tenant];
    return tenant.devices < 100 || std::isfinite(tenant.memory_bytes);
  }

  [[nodiscard]] double cost(const PoolStart& start) const {
    double largest = 0.0;
    for (const JobId id : start.jobs) largest = std::max(largest, jobs.at(id).spec.cost);
    return largest * static_cast<double>(start.jobs.size());
  }

  // No job that waits for the same is before one that starts, unless the device could not end it in time, or not in the
  // largest batch. With padding only the first one must be the next: others overtake, since they are like it.
  void in_order(double now, const PoolStart& start, const Job& last) {
    if (start.probe ||
        (pool_.options().placement != Placement::automatic && pool_.options().placement != Placement::any))
      return;
    const bool padded = pool_.kind(start.kind).padded;
    const bool shared = tenants_.size() > 1;  // then tenants take turns, and each has an order of its own
    if (shared && padded) return;
    const JobId last_id = padded ? start.jobs.front() : start.jobs.back();
    const double last_key = padded ? jobs.at(last_id).key : last.key;
    for (const auto& [id, job] : jobs) {
      const bool same = job.spec.kind == start.kind && job.spec.need == last.spec.need && job.spec.gang == 1 &&
                        (job.spec.priority == Priority::background) == (last.spec.priority == Priority::background) &&
                        (!shared || (job.spec.tenant == last.spec.tenant && job.spec.priority == last.spec.priority &&
                                     std::isfinite(job.deadline) == std::isfinite(last.deadline)));
      const double cost = padded ? job.spec.cost : static_cast<double>(pool_.kind(start.kind).sizes.back());
      const double seconds = pool_.seconds(start.kind, start.devices.front(), cost);
      const double least = now + pool_.margin(start.kind) * ((seconds >= 0.0 ? seconds : 0.0) + start.load_seconds);
      if (!same || !ready(now, job) || (std::isfinite(job.deadline) && job.deadline < least)) continue;
      if (std::ranges::count(start.jobs, id) > 0) continue;
      expect(std::pair(job.key, id) > std::pair(last_key, last_id), "not in the order of keys");
    }
  }

  // Whatever an idle device leaves waiting, it declined, for a reason that holds.
  void idle_devices(double now, const PoolDecisions& decisions) {
    if (pool_.options().placement != Placement::automatic && pool_.options().placement != Placement::any) return;
    for (std::size_t d = 0; d < pool_.device_count(); ++d) {
      if (busy(d) || !pool_.active(d)) continue;
      for (const auto& [id, job] : jobs) {
        if (!ready(now, job) || job.spec.gang > 1 || !accepts(job.spec.need, pool_.device(d))) continue;
        if (pool_.largest_batch(job.spec.kind, d) == 0) continue;
        const auto declined = std::ranges::find_if(decisions.declines, [&](const PoolDecline& one) {
          return one.device == d && one.kind == job.spec.kind && holds(now, one, job);
        });
        expect(declined != decisions.declines.end(), "an idle device left a job waiting without a reason that holds");
        const bool left = runs.empty() && std::ranges::all_of(decisions.declines, [](const PoolDecline& one) {
                            return one.reason == PoolReason::faster_devices;
                          });
        expect(!left, "each device left a job to the others");
      }
    }
  }
  [[nodiscard]] bool holds(double now, const PoolDecline& decline, const Job& job) const {
    switch (decline.reason) {
      case PoolReason::faster_devices: {
        double faster = 0.0;
        const PoolKind& kind = pool_.kind(decline.kind);
        const double own = pool_.seconds(decline.kind, decline.device, 1);
        for (std::size_t e = 0; e < pool_.device_count(); ++e) {
          // With models to load, the seconds also count the load, which may make any device the faster one.
          const double there = pool_.seconds(decline.kind, e, 1);
          if (e != decline.device && (there < own || !kind.model.empty() || kind.padded || kind.sizes.back() > 1))
            faster += 1.0;
        }
        return faster > 0.0 && pool_.options().placement == Placement::automatic;
      }
      case PoolReason::foreground:
        return job.spec.priority == Priority::background;
      case PoolReason::filling:
        return pool_.kind(decline.kind).max_delay_seconds > 0.0;
      case PoolReason::reserved:
        return std::ranges::any_of(jobs,
                                   [&](const auto& one) { return one.second.spec.gang > 1 && ready(now, one.second); });
      case PoolReason::memory:
        return std::isfinite(pool_.device(root(decline.device)).memory_bytes);
      case PoolReason::deadline:
        return std::isfinite(job.deadline) || limited(job);
      case PoolReason::quota:
        return limited(job);
      default:
        return false;
    }
  }

  const PoolState& pool_;
  std::vector<PoolNeed> needs_;
  std::vector<PoolTenant> tenants_;
  std::map<std::size_t, std::map<std::string, double>> resident_;  // by the first device of a memory
  std::set<JobId> done_;
  std::vector<JobId> finished_;
  bool completed_ = false;
};

}  // namespace paceline::plan::testing

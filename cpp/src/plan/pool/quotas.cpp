// SPDX-License-Identifier: Apache-2.0
//
// What the quotas of tenants let run.
#include <algorithm>
#include <map>
#include <ranges>
#include <vector>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

// Whether its quota lets a tenant start a job that waits as `entry`, in a batch with so many of its jobs.
bool State::may_start(std::size_t tenant, KeyEntry entry, std::size_t kind, std::int64_t gang,
                      std::int64_t jobs_of_batch, bool held_in_batch) const {
  constexpr double rounding = 1.0 + 1e-12;  // sums of what was declared may exceed it by that
  const Tenant& of = tenants[tenant];
  const std::int64_t beside = of.held < entry && !held_in_batch ? of.held_gang : 0;
  if (of.devices > of.spec.devices - gang - beside) return false;
  if (of.spec.memory_bytes == kNever) return true;
  double bytes = of.bytes + static_cast<double>(gang) * peak(kind, jobs_of_batch);
  if (beside > 0) bytes += static_cast<double>(beside) * peak(of.held_kind, 1);
  return bytes <= of.spec.memory_bytes * rounding;
}

// What the jobs of each tenant use now.
void State::count_use() {
  for (Tenant& tenant : tenants) {
    tenant.devices = 0;
    tenant.bytes = 0.0;
  }
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (devices[d].run == RunId{} || first_device(devices[d].run) != d) continue;
    Run& run = devices[d].current;
    if (run.shares.empty()) {
      std::map<std::size_t, std::int64_t> counts;
      for (const JobId id : run.jobs) ++counts[jobs.at(id).tenant];
      run.shares.assign(counts.begin(), counts.end());
    }
    for (const auto& [tenant, count] : run.shares) {
      tenants[tenant].devices += std::ssize(run.devices);
      tenants[tenant].bytes += static_cast<double>(run.devices.size()) * peak(run.kind, count);
    }
  }
}

// Of each tenant as many as are asked in a decision.
std::vector<JobId> State::first_gangs() const {
  std::vector<JobId> first;
  for (std::size_t t = 0; !gangs.empty() && t < tenants.size(); ++t) {
    for (const auto& [background, key, id] : tenants[t].gangs | std::views::take(kGangsAsked)) first.push_back(id);
  }
  return first;
}

// What each tenant with a quota must keep room for: the first of its jobs whose patience is over, unless the devices
// for it are retired. It may fit now: its device may be busy, and later jobs would take the quota again and again.
void State::hold_back(double now) {
  count_use();
  for (Tenant& tenant : tenants) tenant.held = {kNever, JobId{}};
  const auto look = [&](const Job& job) {
    Tenant& tenant = tenants[job.tenant];
    const KeyEntry entry{job.key, job.id};
    if (job.timed() || job.background || now < job.key || !(entry < tenant.held)) return;
    tenant.held = entry;
    tenant.held_kind = job.kind;
    tenant.held_gang = job.gang;
  };
  for (const std::size_t at : active_lines) {
    rank(lines[at]);
    if (lines[at].ranked.empty()) continue;
    for (const auto& [tenant, queues] : lines[at].tenants) {
      if (!limited(tenants[tenant].spec)) continue;
      for (const KeyQueue& queue : queues) {
        if (!queue.empty()) look(jobs.at(queue.front().id));
      }
    }
  }
  for (const JobId id : first_gangs()) {
    const Job& job = jobs.at(id);
    if (!limited(tenants[job.tenant].spec)) continue;
    std::int64_t there = 0;
    for (std::size_t d = 0; d < devices.size(); ++d) there += can_use(job, d) ? 1 : 0;
    if (there >= job.gang) look(job);
  }
}

bool State::someone_may_start(const PoolLine& line) const {
  return std::ranges::any_of(line.tenants, [&](const auto& own) {
    return std::ranges::any_of(own.second, [&](const KeyQueue& queue) {
      return !queue.empty() && may_start(own.first, queue.front(), line.kind, 1, 1);
    });
  });
}

// Whether a quota could hold back a job: one of as many devices as there are does not.
bool State::has_quota(const Job& job) const {
  if (!quotas) return false;
  const PoolTenant& spec = tenants[job.tenant].spec;
  return spec.devices < std::ssize(devices) || spec.memory_bytes < kNever;
}

// How many of so many waiting jobs of a tenant its quota leaves out: the others are as many batches as it still has
// devices and memory for. They use these, also for what is asked next.
std::int64_t State::beyond_quota(std::size_t number, std::size_t kind, std::int64_t waits) {
  Tenant& tenant = tenants[number];
  const std::vector<std::int64_t>& sizes = kinds[kind].spec.sizes;
  const std::int64_t all = std::ssize(devices);  // with these the quota holds nothing back
  for (; waits > 0 && tenant.devices < std::min(tenant.spec.devices, all); ++tenant.devices) {
    const auto fits = [&](std::int64_t size) {
      return size <= waits &&
             (tenant.spec.memory_bytes == kNever || tenant.bytes + peak(kind, size) <= tenant.spec.memory_bytes);
    };
    const auto above = std::ranges::partition_point(sizes, fits);
    if (above == sizes.begin()) break;
    waits -= *(above - 1);
    tenant.bytes += peak(kind, *(above - 1));
  }
  return tenant.devices < all ? waits : 0;
}

// What of a line would run if there were devices, in typical jobs.
double State::units_within_quotas(const PoolLine& line) {
  std::int64_t held = 0;  // jobs
  for (const auto& [tenant, queues] : line.tenants) {
    if (limited(tenants[tenant].spec)) held += beyond_quota(tenant, line.kind, size_of(queues));
  }
  return units(line) * static_cast<double>(line.size() - held) / static_cast<double>(line.size());
}

// Whether a gang that waits would run if there were devices. Then it uses its tenant's quota, too.
bool State::take_quota(const Job& gang) {
  if (!may_start(gang.tenant, {gang.key, gang.id}, gang.kind, gang.gang, 1)) return false;
  tenants[gang.tenant].devices += gang.gang;
  tenants[gang.tenant].bytes += static_cast<double>(gang.gang) * peak(gang.kind, 1);
  return true;
}

// Whether the quota of its tenant holds a job beside what waits of the tenant. Those that it may share a batch with are
// asked last, together with it.
bool State::quota_holds(const Job& job) {
  count_use();
  std::int64_t like_it = job.phase == Job::Phase::in_line ? 0 : 1;  // jobs; it is among those of its line
  for (const std::size_t at : active_lines) {
    const PoolLine& line = lines[at];
    const auto own = line.tenants.find(job.tenant);
    if (own == line.tenants.end()) continue;
    const bool shares =
        job.gang == 1 && line.kind == job.kind && line.need == job.need && line.background == job.background;
    if (shares) {
      like_it += size_of(own->second);
    } else {
      (void)beyond_quota(job.tenant, line.kind, size_of(own->second));
    }
  }
  for (const auto& [background, key, id] : tenants[job.tenant].gangs) {
    if (id != job.id) (void)take_quota(jobs.at(id));
  }
  return job.gang > 1 ? may_start(job.tenant, {job.key, job.id}, job.kind, job.gang, 1)
                      : beyond_quota(job.tenant, job.kind, like_it) == 0;
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

std::int64_t State::limit(std::size_t kind) const {
  if (kinds[kind].spec.queue_limit > 0) return kinds[kind].spec.queue_limit;
  constexpr std::int64_t batches = 8;  // each device always has work, and a request waits for few batches
  std::int64_t sum = 0;
  for (std::size_t d = 0; d < devices.size(); ++d) sum += devices[d].active ? largest(kind, d) : 0;
  return batches * std::max<std::int64_t>(sum, 1);
}

// Whether there are devices for the job. Those that are retired may come back.
bool State::can_run(const Job& job) const {
  std::vector<std::int64_t> in_space(job.spec.gang > 1 ? spaces.size() : 0, 0);
  std::int64_t count = 0;
  for (std::size_t d = 0; d < devices.size() && count < job.spec.gang; ++d) {
    if (devices[d].lost || !accepts(job.spec.need, d) || largest(job.spec.kind, d) == 0) continue;
    const std::size_t space = devices[d].space;
    if (in_space.empty() || in_space[space]++ < together(job.spec.kind, space)) ++count;
  }
  return count >= job.spec.gang;
}

// Whether a job with a deadline can end in time: what is served before it, at the rates of all devices, and itself on
// the fastest one with the margin.
bool State::admits(const Job& job, double now) {
  if (job.deadline == kNever) return true;
  const double begin = now + job.spec.not_before_seconds;
  PoolLine& own = line_of(job, kNone);
  rank(own);
  const double least = job.spec.gang > 1 ? gang_seconds(job) : own.least_seconds;
  const double needed = kinds[job.spec.kind].margin * least;
  if (begin + needed > job.deadline) return false;
  if (!own.known || own.rate <= 0.0) return true;
  double ahead = 0.0;
  const bool background = own.background;
  for (PoolLine& line : lines) {
    if (line.size() == 0 || (line.background && !background)) continue;
    rank(line);
    if (line.rate <= 0.0) continue;
    const KeyEntry entry{job.key, JobId{last_job}};
    const bool before = background && !line.background;
    const std::int64_t count = before ? line.size() : line.timed.count_before(entry) + line.plain.count_before(entry);
    // A line that shares no device with this job does not delay it.
    const bool shares = std::any_of(own.ranked.begin(), own.ranked.end(), [&](const PoolLine::Ranked& one) {
      return accepts(line.need, one.device) && (line.bound == kNone || line.bound == one.device);
    });
    if (shares && line.bound == kNone) ahead += static_cast<double>(count) / line.rate;
  }
  return std::max(begin, now + ahead) + needed <= job.deadline;
}

void State::enqueue(JobId id, Job& job, double now) {
  job.held = false;
  if (job.spec.gang > 1) {
    job.gang = true;
    gangs.emplace(job.spec.priority == Priority::background, job.key, id);
    return;
  }
  const std::size_t bound = choose_at_submit(job, now);
  if (bound != kNone) ++devices[bound].bound;
  PoolLine& line = line_of(job, bound);
  job.line = static_cast<std::size_t>(&line - lines.data());
  line.of(job.deadline < kNever).insert({job.key, id});
}

// Back into the queue after a run.
void State::again(JobId id, Job& job, double now) {
  job.run = RunId{};
  ++waiting;
  ++kinds[job.spec.kind].held;
  enqueue(id, job, now);
}

// Takes a waiting job out of where it waits.
void State::unqueue(JobId id, Job& job) {
  --waiting;
  --kinds[job.spec.kind].held;
  if (job.gang) {
    gangs.erase({job.spec.priority == Priority::background, job.key, id});
    job.gang = false;
  } else if (job.line != kNone) {
    PoolLine& line = lines[job.line];
    line.of(job.deadline < kNever).erase({job.key, id});
    if (line.bound != kNone) --devices[line.bound].bound;
    job.line = kNone;
  } else {
    starts_at.erase({job.submitted + job.spec.not_before_seconds, id});
    held_deadlines.erase({job.deadline, id});
  }
}

// Nothing holds the job back any more.
void State::release(JobId id, double now, PoolDecisions& out) {
  Job& job = jobs.at(id);
  if (!job.held || job.blockers > 0 || starts_at.contains({job.submitted + job.spec.not_before_seconds, id})) return;
  held_deadlines.erase({job.deadline, id});
  if (can_run(job)) return enqueue(id, job, now);
  end(id, JobOutcome::failed, PoolReason::out_of_memory, std::nullopt, out);
}

// Ends a job, and with it, unless it completed, all that depends on it. A list instead of recursion: chains are long.
void State::end(JobId id, JobOutcome outcome, PoolReason reason, std::optional<JobId> cause, PoolDecisions& out) {
  std::vector<PoolEnd> todo{{id, outcome, reason, cause}};
  while (!todo.empty()) {
    const PoolEnd one = todo.back();
    todo.pop_back();
    const auto found = jobs.find(one.job);
    if (found == jobs.end()) continue;
    if (found->second.run == RunId{}) unqueue(one.job, found->second);
    const std::vector<JobId> dependents = std::move(found->second.dependents);
    jobs.erase(found);
    out.ends.push_back(one);
    for (const JobId next : dependents) {
      const auto dependent = jobs.find(next);
      if (dependent == jobs.end()) continue;
      if (one.outcome != JobOutcome::completed) {
        todo.push_back({next, JobOutcome::cancelled, PoolReason::dependency, one.job});
      } else if (--dependent->second.blockers == 0) {
        release(next, last_now, out);
      }
    }
  }
}

// Jobs that are bound to a device that cannot run them any more go to others.
void State::rebind(std::size_t device, double now) {
  std::vector<JobId> moved;
  for (const PoolLine& line : lines) {
    if (line.bound != device || (devices[device].active && largest(line.kind, device) > 0)) continue;
    for (const KeyQueue* queue : {&line.timed, &line.plain}) {
      for (KeyQueue::Place place = queue->begin(); queue->at(place) != nullptr; place = queue->next(place))
        moved.push_back(queue->at(place)->id);
    }
  }
  for (const JobId id : moved) {
    Job& job = jobs.at(id);
    unqueue(id, job);
    again(id, job, now);
  }
}

// Ends the waiting jobs, of a kind or of all kinds, for which there are no devices any more.
void State::fail_stranded(std::optional<std::size_t> kind, PoolReason reason, PoolDecisions& out) {
  std::vector<JobId> stranded;
  for (const auto& [id, job] : jobs) {
    if (job.spec.kind == kind.value_or(job.spec.kind) && job.run == RunId{} && !can_run(job)) stranded.push_back(id);
  }
  std::sort(stranded.begin(), stranded.end());
  for (const JobId id : stranded) end(id, JobOutcome::failed, reason, std::nullopt, out);
}

void State::ended_badly(const Run& run, RunResult result, double now, PoolDecisions& out) {
  Kind& kind = kinds[run.kind];
  const std::int64_t size = std::ssize(run.jobs);
  const bool batches = kind.spec.sizes.back() > 1;
  bool retry = kind.spec.idempotent;
  PoolReason reason = PoolReason::error;
  if (result == RunResult::out_of_memory) {
    reason = PoolReason::out_of_memory;
    retry = batches;
    if (batches) {
      std::int64_t& cap = kind.memory_cap[run.devices.front()];
      cap = std::min(cap, size / 2);
      ++kind.epoch;
    }
  } else if (result == RunResult::device_lost) {
    reason = PoolReason::device_lost;
  } else {
    retry = retry && size > 1;
  }
  for (const JobId id : run.jobs) {
    Job& job = jobs.at(id);
    if (retry && result == RunResult::failed) job.most = size / 2;
    if (retry && can_run(job)) {
      again(id, job, now);
    } else {
      end(id, JobOutcome::failed, reason, std::nullopt, out);
    }
  }
  if (result != RunResult::out_of_memory || !batches) return;
  rebind(run.devices.front(), now);
  fail_stranded(run.kind, PoolReason::out_of_memory, out);
}

// The 90 % quantile of the last runs' actual over predicted seconds, every eight runs.
void State::observe(Kind& kind, double ratio) {
  constexpr std::size_t window = 128;
  constexpr std::size_t least = 10;
  if (kind.ratios.size() < window) {
    kind.ratios.push_back(ratio);
  } else {
    kind.ratios[kind.runs % window] = ratio;
  }
  ++kind.runs;
  if (kind.ratios.size() < least || (kind.ratios.size() > least && kind.runs % 8 != 0)) return;
  std::vector<double> sorted = kind.ratios;
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() * 9 / 10);
  std::nth_element(sorted.begin(), at, sorted.end());
  kind.margin = *at;
}

void State::settle(double now, PoolDecisions& out) {
  while (!starts_at.empty() && starts_at.begin()->first <= now) {
    const JobId id = starts_at.begin()->second;
    starts_at.erase(starts_at.begin());
    release(id, now, out);
  }
  expire(now, out);
  do {
    out.declines.clear();
    hold_until = kNever;
  } while (idle > 0 && waiting > 0 && step(now, out));
  out.wake_seconds = wake(now, out);
}

}  // namespace paceline::plan

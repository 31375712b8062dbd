// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

std::int64_t State::limit(std::size_t kind) const {
  if (kinds[kind].spec.queue_limit > 0) return kinds[kind].spec.queue_limit;
  constexpr std::int64_t batches = 8;  // each device always has work, and a request waits for few batches
  std::int64_t sum = 0;
  for (std::size_t d = 0; d < devices.size(); ++d) sum += devices[d].active || devices[d].paused ? largest(kind, d) : 0;
  return batches * std::max<std::int64_t>(sum, 1);
}

// Whether there are devices for the job. Those that are retired may come back.
bool State::can_run(const Job& job) const {
  std::vector<std::int64_t> in_space(job.gang > 1 ? spaces.size() : 0, 0);
  std::int64_t count = 0;
  for (std::size_t d = 0; d < devices.size() && count < job.gang; ++d) {
    if (devices[d].lost || !accepts(job.need, d) || largest(job.kind, d) == 0) continue;
    const std::size_t space = devices[d].space;
    if (in_space.empty() || in_space[space]++ < together(job.kind, space)) ++count;
  }
  return count >= job.gang;
}

// What comes counts once, from when a device could run it. A client that gives up afterwards has come all the same.
void State::arrive(Job& job) {
  if (std::exchange(job.arrived, true)) return;
  kinds[job.kind].arrived += static_cast<double>(job.gang) * job.cost / kinds[job.kind].cost;
}

// What no device served, though it could have started: its tenant's quota has room.
void State::turn_away(Job& job) {
  if (has_quota(job)) {
    if (!quota_holds(job)) return;
    use_need(job.need, last_now);
  }
  arrive(job);
}

void State::use_need(std::size_t need, double due) {
  if (need >= needs_used.size()) needs_used.resize(need + 1, -kNever);
  needs_used[need] = std::max(needs_used[need], due);
}

void State::enqueue(Job& job, double now) {
  if (!has_quota(job)) arrive(job);
  if (job.gang > 1) {
    job.phase = Job::Phase::in_gangs;
    gangs.emplace(job.background, job.key, job.id);
    if (has_tenants) join(job, nullptr);
    return;
  }
  const std::size_t bound = choose_at_submit(job, now);
  if (bound != kNone) ++devices[bound].bound;
  PoolLine& line = line_of(job, bound);
  job.phase = Job::Phase::in_line;
  job.line = static_cast<std::size_t>(&line - lines.data());
  put_in(line, job);
}

// Back into the queue after a run. What was charged for it stays charged, and it starts again for nothing.
void State::again(Job& job, double now) {
  hold(job, 1);
  enqueue(job, now);
}

// Takes a waiting job out of where it waits.
void State::unqueue(Job& job) {
  hold(job, -1);
  if (job.phase == Job::Phase::in_gangs) {
    gangs.erase({job.background, job.key, job.id});
    if (has_tenants) leave(job, nullptr);
  } else if (job.phase == Job::Phase::in_line) {
    PoolLine& line = lines[job.line];
    take_out(line, job);
    if (line.bound != kNone) --devices[line.bound].bound;
  } else {
    starts_at.erase({job.due, job.id});
    held_deadlines.erase({job.deadline, job.id});
  }
}

// Nothing holds the job back any more.
void State::release(JobId id, double now, PoolDecisions& out) {
  Job& job = jobs.at(id);
  if (job.phase != Job::Phase::held || job.blockers > 0 || starts_at.contains({job.due, id})) return;
  held_deadlines.erase({job.deadline, id});
  if (can_run(job)) return enqueue(job, now);
  end(id, JobOutcome::failed, PoolReason::out_of_memory, std::nullopt, out);
}

// Ends a job, and with it, unless it completed, all that depends on it. A list instead of recursion: chains are long.
void State::end(JobId id, JobOutcome outcome, PoolReason reason, std::optional<JobId> cause, PoolDecisions& out) {
  std::vector<PoolEnd> todo;
  for (PoolEnd one{id, outcome, reason, cause};; one = todo.back(), todo.pop_back()) {
    if (Job* job = jobs.find(one.job)) {
      if (job->phase != Job::Phase::runs) unqueue(*job);
      if (has_tenants && owed(*job) == 0.0) tenants[job->tenant].served += job->charge;
      const std::vector<JobId> dependents = std::move(job->dependents);
      jobs.erase(*job);
      out.ends.push_back(one);
      for (const JobId next : dependents) {
        Job* dependent = jobs.find(next);
        if (dependent == nullptr) continue;
        if (one.outcome != JobOutcome::completed) {
          todo.push_back({next, JobOutcome::cancelled, PoolReason::dependency, one.job});
        } else if (--dependent->blockers == 0) {
          release(next, last_now, out);
        }
      }
    }
    if (todo.empty()) return;
  }
}

// Jobs that are bound to a device that cannot run them any more go to others.
void State::rebind(std::size_t device, double now) {
  std::vector<JobId> moved;
  for (const std::size_t at : active_lines) {
    const PoolLine& line = lines[at];
    if (line.bound != device || (devices[device].active && largest(line.kind, device) > 0)) continue;
    for (const KeyQueue* queue : {&line.timed, &line.plain}) {
      for (KeyQueue::Place place = queue->begin(); queue->at(place) != nullptr; place = queue->next(place))
        moved.push_back(queue->at(place)->id);
    }
  }
  for (const JobId id : moved) {
    Job& job = jobs.at(id);
    unqueue(job);
    again(job, now);
  }
}

// Ends the waiting jobs, of a kind or of all kinds, for which there are no devices any more.
void State::fail_stranded(std::optional<std::size_t> kind, PoolReason reason, PoolDecisions& out) {
  std::vector<JobId> stranded;
  for (const Job& job : jobs.slots()) {
    if (job.id == JobId{} || job.phase == Job::Phase::runs || job.kind != kind.value_or(job.kind)) continue;
    if (!can_run(job)) stranded.push_back(job.id);
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
      std::int64_t& most = kind.largest[run.devices.front()];
      most = size_within(kind.spec.sizes, std::min(most, size / 2));
      ++kind.epoch;
    }
  } else if (result == RunResult::device_lost) {
    reason = PoolReason::device_lost;
  } else if (result == RunResult::given_up) {
    retry = false;
  } else {
    retry = retry && size > 1;
  }
  for (const JobId id : run.jobs) {
    Job& job = jobs.at(id);
    if (retry && result == RunResult::failed) job.most = size / 2;
    if (retry && can_run(job)) {
      again(job, now);
    } else {
      end(id, JobOutcome::failed, reason, std::nullopt, out);
    }
  }
  if (result != RunResult::out_of_memory || !batches) return;
  rebind(run.devices.front(), now);
  fail_stranded(run.kind, PoolReason::out_of_memory, out);
}

// What a batch of this size took.
void State::note_size(Kind& kind, const Run& run, double seconds) {
  const std::vector<std::int64_t>& sizes = kind.spec.sizes;
  const auto place = std::ranges::find(sizes, std::ssize(run.jobs));
  Measured& on = kind.on[run.devices.front()];
  on.times.add(static_cast<std::size_t>(place - sizes.begin()), sizes.size(), seconds);
  if (on.known && on.times.compare(on.model, sizes)) ++kind.epoch;
}

// The means of the last 100 runs or so, of their squares the last 1000, for how long a job waits for one that runs.
// One that hung counts as ten: it says nothing about the next.
void State::note_run(Kind& kind, const Run& run, double seconds) {
  constexpr std::int64_t window = 100;
  const std::size_t first = run.devices.front();
  const auto most = static_cast<double>(largest(run.kind, first));
  const double batch = this->seconds(run.kind, first, kind.cost * most);
  if (!(batch > 0.0)) return;
  kind.ran.resize(devices.size());
  kind.ran[first].rate = most / batch;
  double mean = 0.0;  // work
  for (const Ran& one : kind.ran) mean += one.seconds * one.rate;
  seconds *= static_cast<double>(run.devices.size());
  if (kind.runs_seen > 10) seconds = std::min(seconds, 10.0 * mean / kind.ran[first].rate);
  kind.runs_seen = std::min(kind.runs_seen + 1, 10 * window);
  const double gain = 1.0 / static_cast<double>(std::min(kind.runs_seen, window));
  for (Ran& one : kind.ran) one.seconds -= gain * one.seconds;
  kind.ran[first].seconds += gain * seconds;
  kind.run_jobs += gain * (static_cast<double>(run.jobs.size() * run.devices.size()) - kind.run_jobs);
  const double work = seconds * kind.ran[first].rate;
  const double ratio = work / (mean + gain * (work - mean));
  kind.run_variation += (ratio * ratio - kind.run_variation) / static_cast<double>(kind.runs_seen);
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

// A typical job has the mean cost of the last 1,000 or so. Devices are ranked anew when it has moved by a quarter.
void State::typical(Kind& kind, double cost) {
  constexpr std::int64_t window = 1000;
  kind.submitted = std::min(kind.submitted + 1, window);
  kind.mean_cost += (cost - kind.mean_cost) / static_cast<double>(kind.submitted);
  if (std::abs(kind.mean_cost - kind.cost) <= 0.25 * kind.cost) return;
  kind.cost = kind.mean_cost;
  ++kind.epoch;
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
  count_on_released(out);
  out.wake_seconds = wake(now, out);
}

}  // namespace paceline::plan

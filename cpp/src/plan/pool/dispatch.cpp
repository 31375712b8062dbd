// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "plan/pool/state.hpp"

namespace paceline::plan {
namespace {

// The sum over faster devices is s_j * Σ 1 / s_e - their number, which is rounded otherwise than the rule. At a tie the
// device declines, as in the rule.
constexpr double kDeclineTie = 1.0 + 1e-9;

}  // namespace

using State = PoolState::State;

bool State::foreground_waits(std::size_t device) {
  for (const std::size_t at : active_lines) {
    const PoolLine& line = lines[at];
    if (line.background || !accepts(line.need, device) || (quotas && !someone_may_start(line))) continue;
    if ((line.bound == kNone || line.bound == device) && largest(line.kind, device) > 0) return true;
  }
  if (gangs.empty() || std::get<0>(*gangs.begin())) return false;
  for (const auto& [background, key, id] : gangs) {
    const Job& job = jobs.at(id);
    if (!background && accepts(job.need, device) &&
        (!quotas || may_start(job.tenant, {key, id}, job.kind, job.gang, 1)))
      return true;
  }
  return false;
}

bool State::start_from(PoolLine& line, double now, PoolDecisions& out) {
  rank(line);
  const Kind& kind = kinds[line.kind];
  const bool plans = options.placement == Placement::automatic && line.known;
  const bool batches = kind.spec.sizes.back() > 1;
  std::optional<std::size_t> chosen;
  if (options.placement == Placement::custom) {
    std::vector<PoolCandidate> candidates;
    for (const PoolLine::Ranked& one : line.ranked) {
      const Device& device = devices[one.device];
      const bool free = device.run == RunId{};
      const bool measured_there = measured(line.kind, one.device).known;
      candidates.push_back({one.device, device.spec.name, free, free ? 0.0 : std::max(device.free_at - now, 0.0),
                            measured_there ? one.seconds : kNever});
    }
    const Job* next = has_tenants && !line.ranked.empty() ? first_for(line, line.ranked.front(), now) : nullptr;
    if (next == nullptr) next = &jobs.at(line.front()->id);
    chosen = options.choose(
        {now, next->id, line.kind, kind.spec.name, next->priority, next->deadline - now, line.size(), candidates});
    if (ledger != nullptr) ledger->chose(chosen);
  }
  double inverse = 0.0;
  double busy = 0.0;
  bool others_are_faster = false;  // for batches, what one device leaves to faster ones its slower ones leave, too
  for (const PoolLine::Ranked& one : line.ranked) {
    Device& device = devices[one.device];
    if (device.run != RunId{}) {
      inverse += one.seconds > 0.0 ? 1.0 / one.seconds : 0.0;
      busy += 1.0;
      continue;
    }
    PoolDecline decline{one.device, line.kind, PoolReason::none, units(line), 0.0};
    const auto declines = [&](PoolReason reason) {
      decline.reason = reason;
      out.declines.push_back(decline);
    };
    const JobId probed = now >= device.declines_since + options.probe_seconds ? first_plain(line, one, now) : JobId{};
    const bool probe = probed != JobId{};
    const bool backfill = reserving != JobId{} && reserved[one.device] != 0;
    const double end_by = backfill ? reserved_until : kNever;
    const Job* first = first_for(line, one, now);
    if (line.background && !probe && foreground_waits(one.device)) {
      declines(PoolReason::foreground);
    } else if (first == nullptr) {
      declines(quotas && !someone_may_start(line) ? PoolReason::quota : PoolReason::deadline);
    } else if (options.placement == Placement::custom && chosen != one.device) {
      declines(PoolReason::chosen_otherwise);
    } else if (backfill &&
               (!line.known || now + kind.margin * (alone_seconds(line, one, first->cost) + one.load) > end_by)) {
      declines(PoolReason::reserved);
    } else {
      std::vector<JobId> next;
      bool slow = false;
      if (plans) {
        decline.threshold = batches ? 0.0 : options.decline * kDeclineTie * std::max(one.seconds * inverse - busy, 0.0);
        // What waits is counted only where it decides.
        if (batches) {
          decline.waiting = units_waiting(line, kNever);
          if (!others_are_faster) next = batch(line, one, now, end_by, decline.waiting);
          slow = next.empty();
          others_are_faster = slow && !kind.spec.padded && line.on_lines;  // or it depends on cost or size
        } else if (decline.waiting <= decline.threshold) {
          decline.waiting = units_waiting(line, one.seconds);
          slow = decline.waiting <= decline.threshold;
        }
      }
      if (slow && !probe) {
        device.declines_since = std::min(device.declines_since, now);
        declines(PoolReason::faster_devices);
        continue;
      }
      // A probe has no deadline: the first plain job, whatever waits before it.
      if (slow) next = {probed};
      if (next.empty()) next = batch(line, one, now, end_by, std::nullopt);
      const std::int64_t size = std::ssize(next);
      const double full_at = jobs.at(next.front()).submitted + kind.spec.max_delay_seconds;
      if (now < full_at && line.size() < one.largest && size < one.largest && jobs.at(next.front()).most > size) {
        hold_until = std::min(hold_until, full_at);
        declines(PoolReason::filling);
      } else if (!room(line.kind, one.device, size)) {
        declines(PoolReason::memory);
      } else {
        const JobId lead = std::ranges::find(next, first->id) == next.end() ? next.front() : first->id;
        start(line, one.device, std::move(next), slow ? JobId{} : lead, now, slow, out);
        return true;
      }
    }
  }
  return false;
}

void State::start(PoolLine& line, std::size_t d, std::vector<JobId> next, JobId lead, double now, bool probe,
                  PoolDecisions& out) {
  Device& device = devices[d];
  const std::int64_t size = std::ssize(next);
  PoolStart start{.run = next_run(d), .devices = {d}, .jobs = std::move(next), .kind = line.kind, .probe = probe};
  start.cost = cost_of(line.kind, start.jobs);
  start.predicted_seconds = seconds(line.kind, d, start.cost);
  start.load_seconds = take_room(line.kind, d, size, start);
  start_jobs(start.jobs, &line, lead);
  --idle;
  device.run = start.run;
  device.declines_since = kNever;
  device.free_at = start.predicted_seconds >= 0.0 ? now + start.load_seconds + start.predicted_seconds : kNever;
  ++running;
  Run& run = device.current;
  run.devices = start.devices;
  run.jobs = start.jobs;
  run.kind = line.kind;
  run.predicted = start.predicted_seconds;
  run.peak_bytes = peak(line.kind, size);
  run.bound = line.bound != kNone;
  run.shares.clear();
  out.starts.push_back(std::move(start));
}

// Starts one batch or one gang. False if no idle device takes anything.
bool State::step(double now, PoolDecisions& out) {
  heads.clear();
  reserving = JobId{};
  if (has_tenants) {
    fair_heads(now);
  } else {
    for (const std::size_t i : active_lines) {
      const KeyEntry* head = lines[i].front();
      heads.emplace_back(lines[i].background, head->key, head->id, i);
    }
    std::size_t asked = 0;
    for (auto gang = gangs.begin(); gang != gangs.end() && asked < kGangsAsked; ++gang, ++asked)
      heads.emplace_back(std::get<0>(*gang), std::get<1>(*gang), std::get<2>(*gang), kNone);
    if (heads.size() > 1) std::sort(heads.begin(), heads.end());
  }
  for (const auto& [background, key, id, line] : heads) {
    if (line == kNone ? gang_step(id, now, out) : start_from(lines[line], now, out)) return true;
  }
  return false;
}

}  // namespace paceline::plan

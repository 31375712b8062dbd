// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "plan/pool/state.hpp"

namespace paceline::plan {
namespace {

// The sum over faster devices is s_j * Σ 1 / s_e - their number, which is rounded otherwise than the rule. At a tie the
// device declines, as in the rule.
constexpr double kDeclineTie = 1.0 + 1e-9;
constexpr std::size_t kGangsAsked = 16;  // of those that wait: the others have larger keys

// Jobs that a device ends in less than `seconds`, in batches of at most `largest` back to back. What differs by
// rounding is equal: otherwise each of two equal devices could leave a job to the other one.
double jobs_before(const CostModel& model, std::int64_t largest, double seconds) {
  constexpr double rounding = 1e-12;
  seconds -= rounding * seconds;
  if (!(seconds > 0.0)) return 0.0;
  const double batch = model.seconds(largest);
  if (batch <= 0.0) return kNever;
  const double full = std::max(std::ceil(seconds / batch) - 1.0, 0.0);
  const double rest = seconds - full * batch - model.fixed_seconds();
  double more = 0.0;
  if (rest > 0.0) {
    more = static_cast<double>(largest);
    if (model.per_item_seconds() > 0.0) more = std::clamp(std::ceil(rest / model.per_item_seconds()) - 1.0, 0.0, more);
  }
  return full * static_cast<double>(largest) + more;
}

}  // namespace

using State = PoolState::State;

void State::expire(double now, PoolDecisions& out) {
  while (!held_deadlines.empty() && held_deadlines.begin()->first < now)
    end(held_deadlines.begin()->second, JobOutcome::expired, PoolReason::deadline, std::nullopt, out);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].timed.empty()) continue;
    rank(lines[i]);
    // The same difference as in wake(), so that a tick at that time expires what it is for.
    const double needed = kinds[lines[i].kind].margin * lines[i].least_seconds;
    while (!lines[i].timed.empty() && lines[i].timed.front().key - needed < now)
      end(lines[i].timed.front().id, JobOutcome::expired, PoolReason::deadline, std::nullopt, out);
  }
  if (!gangs.empty()) expire_gangs(now, out);
}

const KeyEntry* State::first_for(const PoolLine& line, double least_deadline) const {
  const KeyEntry* timed = line.timed.at(line.timed.lower_bound({least_deadline, JobId{}}));
  const KeyEntry* plain = line.plain.empty() ? nullptr : &line.plain.front();
  return timed == nullptr || (plain != nullptr && *plain < *timed) ? plain : timed;
}

bool State::foreground_waits(std::size_t device) {
  for (PoolLine& line : lines) {
    if (line.background || line.size() == 0 || !accepts(line.need, device)) continue;
    if ((line.bound == kNone || line.bound == device) && largest(line.kind, device) > 0) return true;
  }
  if (gangs.empty() || std::get<0>(*gangs.begin())) return false;
  for (const auto& [background, key, id] : gangs) {
    if (!background && accepts(jobs.at(id).need, device)) return true;
  }
  return false;
}

// The jobs that are next for a device, and for which a batch of their number is allowed.
std::vector<JobId> State::batch(const PoolLine& line, double least_deadline, std::int64_t size) const {
  std::vector<JobId> found;
  found.reserve(static_cast<std::size_t>(std::min(size, line.size())));
  KeyQueue::Place timed = line.timed.lower_bound({least_deadline, JobId{}});
  KeyQueue::Place plain = line.plain.begin();
  for (std::int64_t most = size; std::ssize(found) < most;) {
    const KeyEntry* a = line.timed.at(timed);
    const KeyEntry* b = line.plain.at(plain);
    if (a == nullptr && b == nullptr) break;
    const bool take_timed = b == nullptr || (a != nullptr && *a < *b);
    const JobId id = take_timed ? a->id : b->id;
    const std::int64_t own = jobs.at(id).most;
    if (own <= std::ssize(found)) break;
    most = std::min(most, own);
    found.push_back(id);
    (take_timed ? timed : plain) = take_timed ? line.timed.next(timed) : line.plain.next(plain);
  }
  return found;
}

// The largest size k for which all devices together end less than what waits before this one could end k. With the
// least T at which they end it all, that is the largest k that this device ends by T: sizes are few, so T itself, which
// would take thirty halvings, is not needed. 0: by T the device ends nothing.
std::int64_t State::planned(PoolLine& line, const PoolLine::Ranked& on, double now, double units) const {
  const std::vector<std::int64_t>& sizes = kinds[line.kind].spec.sizes;
  if (on.model.seconds(on.largest) <= 0.0) return size_within(sizes, on.largest);  // it takes no time
  const auto early = [&](std::int64_t size) {
    const double seconds = on.seconds - on.alone + on.model.seconds(size);
    double sum = 0.0;
    for (const PoolLine::Ranked& other : line.ranked) {
      const Device& device = devices[other.device];
      const double free =
          (device.run == RunId{} ? 0.0 : std::max(device.free_at - now, 0.0)) + other.seconds - other.alone;
      sum += jobs_before(other.model, other.largest, seconds - free);
      if (sum >= units) return false;
    }
    return true;
  };
  if (early(on.largest)) return on.largest;  // much waits
  const auto last = std::upper_bound(sizes.begin(), sizes.end(), on.largest);
  const auto found = std::partition_point(sizes.begin(), last, early);
  return found == sizes.begin() ? 0 : *(found - 1);
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
      candidates.push_back(
          {one.device, free, free ? 0.0 : std::max(device.free_at - now, 0.0), measured_there ? one.seconds : kNever});
    }
    const KeyEntry* head = first_for(line, -kNever);
    chosen = options.choose({now, head->id, line.kind, line.size(), candidates});
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
    PoolDecline decline{one.device, line.kind, PoolReason::none, static_cast<double>(line.size()), 0.0};
    const auto declines = [&](PoolReason reason) {
      decline.reason = reason;
      out.declines.push_back(decline);
    };
    const bool probe = now >= device.declines_since + options.probe_seconds && !line.plain.empty();
    const bool backfill = reserving != JobId{} && reserved[one.device] != 0;
    const double end_by = backfill ? reserved_until : kNever;
    const double one_job = now + kind.margin * one.seconds;
    const KeyEntry* first = first_for(line, one_job);
    if (line.background && !probe && foreground_waits(one.device)) {
      declines(PoolReason::foreground);
    } else if (first == nullptr) {
      declines(PoolReason::deadline);
    } else if (options.placement == Placement::custom && chosen != one.device) {
      declines(PoolReason::chosen_otherwise);
    } else if (backfill && (!line.known || one_job > end_by)) {
      declines(PoolReason::reserved);
    } else {
      std::int64_t size = size_within(kind.spec.sizes, std::min(one.largest, line.size()));
      bool slow = false;
      if (plans) {
        decline.threshold = batches ? 0.0 : options.decline * kDeclineTie * std::max(one.seconds * inverse - busy, 0.0);
        // What waits is counted only where it decides.
        if (batches) {
          decline.waiting = units_waiting(line, kNever);
          const std::int64_t plan = others_are_faster ? 0 : planned(line, one, now, decline.waiting);
          others_are_faster = slow = plan == 0;
          size = std::min(size, plan);
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
      if (slow) size = 1;
      // A probe has no deadline: the first plain job, whatever waits before it.
      std::vector<JobId> next = slow ? std::vector<JobId>{line.plain.front().id} : batch(line, one_job, size);
      size = size_within(kind.spec.sizes, std::ssize(next));
      const double load = one.seconds - one.alone;
      // The first that has a deadline has the least one.
      const auto timed = std::ranges::find_if(next, [&](JobId id) { return jobs.at(id).timed(); });
      const auto too_late = [&] {
        const double least = timed - next.begin() < size ? std::min(jobs.at(*timed).deadline, end_by) : end_by;
        return least < kNever && now + kind.margin * (load + one.model.seconds(size)) > least;
      };
      while (size > 1 && too_late()) size = size_within(kind.spec.sizes, size - 1);
      next.resize(static_cast<std::size_t>(size));
      const double full_at = jobs.at(next.front()).submitted + kind.spec.max_delay_seconds;
      if (now < full_at && line.size() < one.largest && size < one.largest && jobs.at(next.front()).most > size) {
        hold_until = std::min(hold_until, full_at);
        declines(PoolReason::filling);
      } else if (!room(line.kind, one.device, size)) {
        declines(PoolReason::memory);
      } else {
        start(line, one.device, std::move(next), now, slow, out);
        return true;
      }
    }
  }
  return false;
}

void State::start(PoolLine& line, std::size_t d, std::vector<JobId> next, double now, bool probe, PoolDecisions& out) {
  Device& device = devices[d];
  const std::int64_t size = std::ssize(next);
  PoolStart start{.run = next_run(d), .devices = {d}, .jobs = std::move(next), .kind = line.kind, .probe = probe};
  start.predicted_seconds = seconds(line.kind, d, size);
  start.load_seconds = take_room(line.kind, d, size, start);
  for (const JobId id : start.jobs) {
    Job& job = jobs.at(id);
    line.of(job).erase({job.key, id});
    job.phase = Job::Phase::runs;
  }
  waiting -= size;
  kinds[line.kind].held -= size;
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
  out.starts.push_back(std::move(start));
}

// Starts one batch or one gang. False if no idle device takes anything.
bool State::step(double now, PoolDecisions& out) {
  heads.clear();
  reserving = JobId{};
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (const KeyEntry* head = first_for(lines[i], -kNever))
      heads.emplace_back(lines[i].background, head->key, head->id, i);
  }
  std::size_t asked = 0;
  for (auto gang = gangs.begin(); gang != gangs.end() && asked < kGangsAsked; ++gang, ++asked)
    heads.emplace_back(std::get<0>(*gang), std::get<1>(*gang), std::get<2>(*gang), kNone);
  if (heads.size() > 1) std::sort(heads.begin(), heads.end());
  for (const auto& [background, key, id, line] : heads) {
    if (line == kNone ? gang_step(id, now, out) : start_from(lines[line], now, out)) return true;
  }
  return false;
}

double State::wake(double now, const PoolDecisions& out) {
  double at = kNever;
  const auto consider = [&](double time) { at = std::min(at, std::max(time, std::nextafter(now, kNever))); };
  if (!starts_at.empty()) consider(starts_at.begin()->first);
  if (!held_deadlines.empty()) consider(std::nextafter(held_deadlines.begin()->first, kNever));
  for (PoolLine& line : lines) {
    if (line.timed.empty()) continue;
    rank(line);
    consider(std::nextafter(line.timed.front().key - kinds[line.kind].margin * line.least_seconds, kNever));
  }
  for (const auto& [background, key, id] : gangs) {
    const Job& job = jobs.at(id);
    if (job.timed())
      consider(std::nextafter(job.deadline - kinds[job.kind].margin * gang_seconds(job), kNever));
  }
  if (hold_until < kNever) consider(hold_until);
  for (const PoolDecline& decline : out.declines) {
    const double probe = devices[decline.device].declines_since + options.probe_seconds;
    if (probe > now && probe < kNever) consider(probe);
  }
  return at;
}

}  // namespace paceline::plan

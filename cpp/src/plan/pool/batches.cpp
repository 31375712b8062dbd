// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "plan/pool/fair_walk.hpp"
#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

namespace {

// Jobs of like costs are sought among this many times the largest batch. In simulations twice as many gained nothing up
// to a load of 0.7, and sorting them would take twice as long.
constexpr std::int64_t kLook = 4;

// With deadlines so many of the next jobs are looked at, at most, to find out which are better left.
constexpr std::int64_t kLookForDeadlines = 128;

// Jobs of a cost that a device ends in less than `seconds`, in batches of at most `largest` back to back.
double jobs_before(const CostModel& model, double cost, std::int64_t largest, double seconds) {
  if (!(seconds > 0.0)) return 0.0;
  const auto most = static_cast<double>(largest);
  const double batch = seconds_of(model, cost * most);
  if (batch <= 0.0) return kNever;
  const double full = std::max(std::ceil(seconds / batch) - 1.0, 0.0);
  const double rest = seconds - full * batch - model.fixed_seconds();
  double more = 0.0;
  if (rest > 0.0) {
    const double each = model.per_item_seconds() * cost;
    more = each > 0.0 ? std::clamp(std::ceil(rest / each) - 1.0, 0.0, most) : most;
  }
  return full * most + more;
}

// The same where sizes take what they took.
double jobs_before(std::span<const double> times, std::span<const std::int64_t> sizes, std::int64_t largest,
                   double seconds) {
  if (!(seconds > 0.0)) return 0.0;
  auto place = static_cast<std::size_t>(std::ranges::upper_bound(sizes, largest) - sizes.begin());
  const double batch = times[place - 1];
  if (batch <= 0.0) return kNever;
  const double full = std::max(std::ceil(seconds / batch) - 1.0, 0.0);
  while (place > 0 && times[place - 1] >= seconds - full * batch) --place;
  return full * static_cast<double>(largest) + (place > 0 ? static_cast<double>(sizes[place - 1]) : 0.0);
}

// The jobs of a line that a device can end in time, in the order of their keys.
class Walk {
 public:
  Walk(const State& state, const PoolLine& line, const PoolLine::Ranked& on, double now)
      : state_(state), line_(line), on_(on), now_(now), plain_(line.plain.begin()) {
    timed_ = line.timed.lower_bound({end_of(state.kinds[line.kind].spec.padded ? 0.0 : 1.0), JobId{}});
  }

  const State::Job* next() {
    for (;;) {
      const KeyEntry* a = line_.timed.at(timed_);
      const KeyEntry* b = line_.plain.at(plain_);
      if (a == nullptr && b == nullptr) return nullptr;
      const bool take_timed = b == nullptr || (a != nullptr && *a < *b);
      const State::Job& job = state_.jobs.at((take_timed ? a : b)->id);
      (take_timed ? timed_ : plain_) = take_timed ? line_.timed.next(timed_) : line_.plain.next(plain_);
      if (!take_timed || end_of(job.cost) <= job.deadline) return &job;
    }
  }

 private:
  [[nodiscard]] double end_of(double cost) const {
    return now_ + state_.kinds[line_.kind].margin * (state_.alone_seconds(line_, on_, cost) + on_.load);
  }
  const State& state_;
  const PoolLine& line_;
  const PoolLine::Ranked& on_;
  double now_;
  KeyQueue::Place timed_;
  KeyQueue::Place plain_;
};

template <class Some>
std::vector<JobId> next_of(Some walk, std::int64_t size, std::int64_t waiting) {
  std::vector<JobId> found;
  found.reserve(static_cast<std::size_t>(std::min(size, waiting)));
  while (std::ssize(found) < size) {
    const State::Job* job = walk.next();
    if (job == nullptr || job->most <= std::ssize(found)) break;
    size = std::min(size, job->most);
    found.push_back(job->id);
  }
  return found;
}

}  // namespace

const State::Job* State::first_for(const PoolLine& line, const PoolLine::Ranked& on, double now) const {
  return has_tenants ? FairWalk(*this, line, on, now).next() : Walk(*this, line, on, now).next();
}

// The first job that has no deadline; JobId{}: there is none.
JobId State::first_plain(const PoolLine& line, const PoolLine::Ranked& on, double now) const {
  if (!has_tenants) return line.plain.empty() ? JobId{} : line.plain.front().id;
  FairWalk walk(*this, line, on, now);
  const Job* job = walk.next();
  while (job != nullptr && job->timed()) job = walk.next();
  return job == nullptr ? JobId{} : job->id;
}

// The jobs that are next for a device, if a batch of their number is allowed to each.
std::vector<JobId> State::next_jobs(const PoolLine& line, const PoolLine::Ranked& on, double now,
                                    std::int64_t size) const {
  if (has_tenants) return next_of(FairWalk(*this, line, on, now), size, line.size());
  return next_of(Walk(*this, line, on, now), size, line.size());
}

// What the seconds of a batch are a function of.
double State::cost_of(std::size_t kind, std::span<const JobId> batch) const {
  double largest = kinds[kind].spec.padded ? 0.0 : 1.0;
  if (kinds[kind].spec.padded) {
    for (const JobId id : batch) largest = std::max(largest, jobs.at(id).cost);
  }
  return largest * static_cast<double>(batch.size());
}

// Whether all devices together end less than so many typical jobs in less than `seconds`, or none of them a job of this
// cost. No batch has more than `most` jobs: a larger one may take less, and cannot be had. What differs by rounding is
// equal: otherwise each of two equal devices could leave a job to the other one.
bool State::early(const PoolLine& line, double seconds, double now, double units, double cost,
                  std::int64_t most) const {
  constexpr double rounding = 1e-12;
  double sum = 0.0;
  bool ends_one = !kinds[line.kind].spec.padded;  // what ends a typical job has ended any
  seconds -= rounding * seconds;
  for (const PoolLine::Ranked& other : line.ranked) {
    const Device& device = devices[other.device];
    const double free = (device.run == RunId{} ? 0.0 : std::max(device.free_at - now, 0.0)) + other.load;
    const std::span<const double> times = size_seconds(line.kind, other.device);
    // Jobs with deadlines are given to devices that end them in time alone, even if a batch would be faster.
    if (!times.empty() && !line.timed.empty() && times.front() >= seconds - free) continue;
    sum += times.empty()
               ? jobs_before(other.model, kinds[line.kind].cost, other.largest, seconds - free)
               : jobs_before(times, kinds[line.kind].spec.sizes, std::min(other.largest, most), seconds - free);
    ends_one = ends_one || seconds_of(other.model, cost) < seconds - free;
    if (sum >= units && ends_one) return false;
  }
  return true;
}

// The jobs that a device looks at, in the order of their costs. `next`: the first one.
std::span<const CostEntry> State::by_cost(PoolLine& line, const PoolLine::Ranked& on, double now, JobId& next) {
  const auto look = static_cast<std::size_t>(kLook * on.largest);
  if (look <= CostWindow::kMost && line.limited == 0 && !has_tenants) {
    const std::span<const CostEntry> first = line.window.first(look, line.timed, line.plain, jobs);
    const double margin = kinds[line.kind].margin;
    const auto late = [&](const CostEntry& one) {
      return one.timed && now + margin * (seconds_of(on.model, one.cost) + on.load) > one.key.key;
    };
    if (line.timed.empty() || std::ranges::none_of(first, late)) {
      next = line.front()->id;
      return first;
    }
  }
  walked.clear();
  const std::vector<JobId> found = next_jobs(line, on, now, kLook * on.largest);
  for (const JobId id : found) {
    walked.emplace_back(jobs.at(id));
    walked.back().key.key = static_cast<double>(walked.size());  // its rank
  }
  next = found.empty() ? JobId{} : found.front();
  std::ranges::sort(walked, std::less<>());
  return walked;
}

// The batch of like costs with the first job, when as many are cut into batches as are `looked` at.
void State::cut_padded(PoolLine& line, std::span<const CostEntry> window, JobId first, std::size_t looked,
                       const CostModel& model, std::span<const std::int64_t> sizes, std::vector<JobId>& batch) {
  if (looked < window.size()) window = line.window.smallest(window, looked);
  costs.clear();
  for (const CostEntry& one : window) costs.push_back(one.cost);
  const auto place = std::ranges::find(window, first, [](const CostEntry& one) { return one.key.id; }) - window.begin();
  const auto [begin, end] = cuts.batch_at(costs, static_cast<std::size_t>(place), model, sizes);
  batch.clear();
  for (const CostEntry& one : window.subspan(begin, end - begin)) batch.push_back(one.key.id);
  std::ranges::sort(batch, std::less<>(), [&](JobId id) { return KeyEntry{jobs.at(id).key, id}; });
}

// When a device looks at its next jobs: later than now if those that must end before are better left to others. Jobs
// that are nearly late allow only small batches. So a pool that has once fallen behind would fall further behind, and
// stay there (early drop: Shen et al., Nexus, SOSP 2019). Of all sizes that one counts with which all devices, in
// batches of that size, end most of the next jobs in time; of equals the largest one.
double State::looks_at(const PoolLine& line, const PoolLine::Ranked& on, double now) const {
  const Kind& kind = kinds[line.kind];
  const auto seconds = [&](const PoolLine::Ranked& one, std::int64_t size) {
    return kind.margin * (seconds_of(one.model, static_cast<double>(size) * kind.cost) + one.load);
  };
  std::vector<double> deadlines;
  for (const JobId id : next_jobs(line, on, now, std::min(kLook * on.largest, kLookForDeadlines)))
    deadlines.push_back(jobs.at(id).deadline);
  std::ranges::sort(deadlines);
  if (deadlines.empty() || deadlines.front() >= now + seconds(on, on.largest)) return now;
  double from = now;
  std::int64_t most = 0;
  for (const std::int64_t size : kind.spec.sizes) {
    const double here = seconds(on, size);
    if (size > std::min(on.largest, std::ssize(deadlines)) || deadlines.back() < now + here) break;
    std::vector<std::pair<double, double>> times;  // when a device is free, and the seconds of its batches
    for (const PoolLine::Ranked& one : line.ranked) {
      const Device& device = devices[one.device];
      times.emplace_back(device.run == RunId{} ? now : std::max(now, device.free_at), seconds(one, size));
    }
    std::int64_t in_time = 0;
    for (const double deadline : deadlines) {
      double ended = 0.0;  // by all devices until then
      for (const auto& [free, batch] : times) {
        if (deadline > free) ended += static_cast<double>(size) * std::floor((deadline - free) / batch);
      }
      if (static_cast<double>(in_time + 1) <= ended) ++in_time;
    }
    if (in_time < most) continue;
    most = in_time;
    from = now + here - seconds(on, 1);
  }
  return from;
}

// The jobs that a device takes: the largest batch, of k jobs, that ends in time and, if the plan is asked, for which
// all devices together end less than what waits before this one could end k. With the least T at which they end it all,
// that is the largest k that this device ends by T: sizes are few, so T itself, which would take thirty halvings, is
// not needed. None: by T the device ends nothing.
//
// With padding, the next jobs are cut into batches of like costs, and the one with the first job is taken. So nothing
// waits for ever.
std::vector<JobId> State::batch(PoolLine& line, const PoolLine::Ranked& on, double now, double end_by,
                                std::optional<double> units) {
  const Kind& kind = kinds[line.kind];
  const std::span<const std::int64_t> sizes = kind.spec.sizes;
  const bool cut = units && kind.spec.padded;
  const std::span<const double> times = size_seconds(line.kind, on.device);
  const bool plans = units && on.model.seconds(on.largest) > 0.0;  // otherwise it takes no time
  JobId first{};
  const std::span<const CostEntry> window = cut ? by_cost(line, on, now, first) : std::span<const CostEntry>{};
  const bool may_leave = line.known && !line.timed.empty() && !kind.spec.padded && sizes.size() > 1;
  std::vector<JobId> next =
      cut ? std::vector<JobId>{} : next_jobs(line, on, may_leave ? looks_at(line, on, now) : now, on.largest);
  const std::int64_t most = std::min(on.largest, cut ? std::ssize(window) : std::ssize(next));
  const std::int64_t can_be_had = most < std::min(on.largest, line.size()) ? most : line.size();
  for (std::size_t some = sizes.size(); some > 0; --some) {
    const std::int64_t size = sizes[some - 1];
    if (size > most) continue;
    if (cut) {
      const std::size_t looked = std::min(window.size(), static_cast<std::size_t>(kLook * size));
      cut_padded(line, window, first, looked, on.model, sizes.first(some), next);
    } else {
      next.resize(static_cast<std::size_t>(size));
    }
    double least = end_by;
    for (const JobId id : next) least = std::min(least, jobs.at(id).deadline);
    const double cost = cost_of(line.kind, next);
    const double seconds = (times.empty() ? seconds_of(on.model, cost) : times[some - 1]) + on.load;
    if (now + kind.margin * seconds > least) continue;
    if (!plans || early(line, seconds, now, *units, cost / static_cast<double>(next.size()), can_be_had)) return next;
  }
  return {};
}

}  // namespace paceline::plan

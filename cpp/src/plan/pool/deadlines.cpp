// SPDX-License-Identifier: Apache-2.0
//
// Which jobs can still end by their deadlines, on devices that are active or that come back for them.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

namespace {
constexpr double kEarlier = 0.05;  // seconds: clocks ring late
}  // namespace

// The ways of a job in a line: the fastest active device, and each released one.
std::vector<PoolWay> State::ways(const PoolLine& line, const Job& job) const {
  std::vector<PoolWay> all;
  if (!line.ranked.empty() || line.released.empty()) all.push_back({.seconds = least_seconds(line, job)});
  for (const PoolLine::Ranked& one : line.released) {
    all.push_back(way_of(devices[one.device], alone_seconds(line, one, job.cost) + one.load));
  }
  return all;
}

// The ways of a gang whose devices are free in so many seconds, infinity: not at all. A gang starts when the last of
// them is there, and ends with the slowest: one way for each moment at which it could start, with the fastest devices.
std::vector<PoolWay> State::gang_ways(const Job& job, std::span<const double> begins) const {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (begins[d] < kNever && accepts(job.need, d) && largest(job.kind, d) > 0) order.emplace_back(begins[d], d);
  }
  std::ranges::stable_sort(order);
  std::vector<PoolWay> all;
  std::vector<double> fastest;
  PoolWay way;
  for (const auto& [begin, d] : order) {
    way.activation = begin;
    if (!devices[d].active) way.counted_since = std::max(way.counted_since, devices[d].counted_since);
    const double alone = seconds(job.kind, d, job.cost);
    const double here = alone >= 0.0 ? alone + load_seconds(job.kind, d) : 0.0;
    fastest.insert(std::ranges::upper_bound(fastest, here), here);
    if (std::ssize(fastest) < job.gang) continue;
    way.seconds = fastest[static_cast<std::size_t>(job.gang) - 1];
    all.push_back(way);
  }
  return all;
}

std::vector<PoolWay> State::gang_ways(const Job& job) const {
  std::vector<double> begins;
  for (const Device& device : devices) begins.push_back(device.active ? 0.0 : device.activation);
  std::vector<PoolWay> all = gang_ways(job, begins);
  if (all.empty()) all.emplace_back();  // until others come back, nothing is known
  return all;
}

// The seconds until what comes before a job is served, by active devices, or by all that its line can have.
double State::seconds_before(PoolLine& own, KeyEntry entry, bool by_active) {
  const auto serves = [&](const PoolLine& line) {
    return [&](const PoolLine::Ranked& one) {
      return accepts(line.need, one.device) && (line.bound == kNone || line.bound == one.device);
    };
  };
  const auto rate_of = [&](const PoolLine& line) { return by_active ? line.rate : line.rate + line.released_rate; };
  double ahead = 0.0;
  for (const std::size_t at : active_lines) {
    PoolLine& line = lines[at];
    if (line.background && !own.background) continue;
    rank(line);
    if (rate_of(line) <= 0.0 || line.bound != kNone) continue;
    const bool before = own.background && !line.background;
    const std::int64_t timed = by_active ? 0 : line.timed.count_before(entry);  // these are looked at one by one
    const std::int64_t count = before ? line.size() : timed + line.plain.count_before(entry);
    // A line that shares no device with this job does not delay it.
    const bool shares = std::ranges::any_of(own.ranked, serves(line)) ||
                        (!by_active && std::ranges::any_of(own.released, serves(line)));
    if (shares) ahead += static_cast<double>(count) / rate_of(line);
  }
  if (by_active || own.released.empty()) return ahead;
  // Released devices serve from when they are there.
  std::vector<std::pair<double, double>> others;  // by that, and their rates
  for (const PoolLine::Ranked& one : own.released)
    others.emplace_back(std::max(way_of(devices[one.device]).ready(last_now) - last_now, 0.0), one.rate);
  std::ranges::sort(others);
  double rate = own.rate;
  double jobs_before = ahead * rate_of(own);
  for (const auto& [from, more] : others) {
    if (rate > 0.0 && jobs_before <= rate * from) break;
    jobs_before += more * from;
    rate += more;
  }
  return rate > 0.0 ? jobs_before / rate : 0.0;
}

// Whether a job with a deadline can end in time: what is served before it, and itself with the margin, on the device
// that ends it first.
bool State::admits(const Job& job, double now) {
  if (job.deadline == kNever) return true;
  PoolLine& own = line_of(job, kNone);
  rank(own);
  const std::vector<PoolWay> all = job.gang > 1 ? gang_ways(job) : ways(own, job);
  const auto can_end = [&](double from) {
    return std::ranges::any_of(all, [&](const PoolWay& way) {
      return std::max(from, way.ready(job.due)) + kinds[job.kind].margin * way.seconds <= job.deadline;
    });
  };
  if (!can_end(job.due)) return false;
  if (!own.known || !own.released_known) return true;
  return can_end(now + seconds_before(own, {job.key, job.id}, false)) && all_end(own, job);
}

double State::last_start(const Job& job, std::span<const PoolWay> all) const {
  double last = -kNever;
  for (const PoolWay& way : all) last = std::max(last, way.last_start(job.deadline, kinds[job.kind].margin));
  return last;
}

// The jobs with deadlines of a line that may be the first ones to be late: without released devices the first one.
template <class Visit>
void State::visit_timed(const PoolLine& line, const Visit& visit) const {
  std::int64_t left = line.released.empty() ? 1 : kTimedAsked;
  for (KeyQueue::Place place = line.timed.begin(); left > 0 && line.timed.at(place) != nullptr; --left) {
    const Job& job = jobs.at(line.timed.at(place)->id);
    place = line.timed.next(place);
    visit(job);
  }
}

void State::expire(double now, PoolDecisions& out) {
  while (!held_deadlines.empty() && held_deadlines.begin()->first < now)
    end(held_deadlines.begin()->second, JobOutcome::expired, PoolReason::deadline, std::nullopt, out);
  std::vector<JobId> late;
  const auto end_late = [&] {
    for (const JobId id : late) {
      turn_away(jobs.at(id));
      end(id, JobOutcome::expired, PoolReason::deadline, std::nullopt, out);
    }
    return !std::exchange(late, {}).empty();
  };
  const auto look = [&](const Job& job, std::span<const PoolWay> all) {
    if (last_start(job, all) < now) late.push_back(job.id);
  };
  for (std::size_t at = 0; at < active_lines.size();) {
    const std::size_t i = active_lines[at];
    if (!lines[i].timed.empty()) rank(lines[i]);
    do {
      visit_timed(lines[i], [&](const Job& job) { look(job, ways(lines[i], job)); });
    } while (end_late());
    if (at < active_lines.size() && active_lines[at] == i) ++at;  // otherwise it is empty, and the next one is here
  }
  for (const auto& [background, key, id] : gangs) {
    if (const Job& job = jobs.at(id); job.timed()) look(job, gang_ways(job));
  }
  (void)end_late();
}

double State::wake(double now, const PoolDecisions& out) {
  double at = kNever;
  const auto consider = [&](double time) { at = std::min(at, std::max(time, std::nextafter(now, kNever))); };
  const auto look = [&](const Job& job, std::span<const PoolWay> all) {
    consider(std::nextafter(last_start(job, all), kNever));
    for (const PoolWay& way : all) {  // the last moment at which it can want a released device
      if (way.counted_since < kNever) continue;
      const double last = way.last_start(job.deadline, kinds[job.kind].margin);
      if (last > now) consider(last - kEarlier > now ? last - kEarlier : last);
    }
  };
  if (!starts_at.empty()) consider(starts_at.begin()->first);
  if (!held_deadlines.empty()) consider(std::nextafter(held_deadlines.begin()->first, kNever));
  for (const std::size_t i : active_lines) {
    if (lines[i].timed.empty()) continue;
    rank(lines[i]);
    visit_timed(lines[i], [&](const Job& job) { look(job, ways(lines[i], job)); });
  }
  for (const auto& [background, key, id] : gangs) {
    if (const Job& job = jobs.at(id); job.timed()) look(job, gang_ways(job));
  }
  if (hold_until < kNever) consider(hold_until);
  for (const PoolDecline& decline : out.declines) {
    const double probe = devices[decline.device].declines_since + options.probe_seconds;
    if (probe > now && probe < kNever) consider(probe);
  }
  return at;
}

// The devices that waiting jobs need to keep their deadlines, in the order of these: each job is given to a device that
// ends it in time, by predicted seconds, a released one if no active one does, as few as will do. `count_on` is called
// with each job that needs a released device, and with all that would do.
std::vector<PoolCover> State::deadline_covers(const CountOn& count_on) {
  if (gangs.empty() && std::ranges::all_of(active_lines, [&](std::size_t at) { return lines[at].timed.empty(); }))
    return {};
  std::vector<std::pair<KeyEntry, std::size_t>> timed;
  std::vector<double> plain_before(lines.size());
  if (quotas) count_use();
  for (const std::size_t at : active_lines) {
    PoolLine& line = lines[at];
    if (line.timed.empty() || (quotas && !someone_may_start(line))) continue;
    rank(line);
    plain_before[at] = seconds_before(line, line.timed.front(), true);
    std::int64_t left = kTimedAsked;
    for (KeyQueue::Place place = line.timed.begin(); left > 0 && line.timed.at(place) != nullptr; --left) {
      timed.emplace_back(*line.timed.at(place), at);
      place = line.timed.next(place);
    }
  }
  std::ranges::sort(timed);
  std::vector<double> begins;  // from now, of the next job there
  for (const Device& device : devices) {
    const double run = device.run == RunId{}
                           ? 0.0
                           : std::max(device.free_at - last_now, 0.1 * run_of(device).predicted);  // it is overdue
    const double there = device.active ? 0.0 : way_of(device).ready(last_now) - last_now;
    begins.push_back(std::max(run, there));
  }
  std::vector<PoolCover> all;
  PoolCover together{.devices = std::vector<bool>(devices.size()), .count = 0};
  std::vector<char> used(devices.size(), 0);
  for (const auto& [entry, at] : timed) {
    const PoolLine& line = lines[at];
    const Job& job = jobs.at(entry.id);
    std::vector<bool> able(devices.size());
    std::vector<std::size_t> away;
    std::tuple best{true, true, kNever};  // released, unused, its end
    const PoolLine::Ranked* chosen = nullptr;
    for (const auto* list : {&line.ranked, &line.released}) {
      for (const PoolLine::Ranked& one : *list) {
        const bool active = devices[one.device].active;
        const double begin = active ? std::max(begins[one.device], plain_before[at]) : begins[one.device];
        const double end = begin + kinds[line.kind].margin * (alone_seconds(line, one, job.cost) + one.load);
        if (last_now + end > job.deadline) continue;
        able[one.device] = true;
        if (!active) away.push_back(one.device);
        if (const std::tuple rank{!active, used[one.device] == 0, end}; rank < best) {
          best = rank;
          chosen = &one;
        }
      }
    }
    if (chosen == nullptr) continue;
    const std::size_t d = chosen->device;
    begins[d] += chosen->rate > 0.0 ? 1.0 / chosen->rate : alone_seconds(line, *chosen, job.cost);
    if (!devices[d].active) count_on(away, 1 - used[d]);
    if (std::exchange(used[d], 1) != 0) continue;
    all.push_back({able, 1});
    for (std::size_t k = 0; k < able.size(); ++k) together.devices[k] = together.devices[k] || able[k];
    if (++together.count > 1) all.push_back(together);
  }
  std::vector<double> active = begins;
  for (std::size_t d = 0; d < active.size(); ++d) active[d] = devices[d].active ? active[d] : kNever;
  std::size_t asked = 0;
  for (auto gang = gangs.begin(); gang != gangs.end() && asked < kGangsAsked; ++gang, ++asked) {
    const Job& job = jobs.at(std::get<2>(*gang));
    if (!job.timed() || (quotas && !may_start(job.tenant, {job.key, job.id}, job.kind, job.gang, 1))) continue;
    const auto in_time = [&](const PoolWay& way) {
      return last_now + way.activation + kinds[job.kind].margin * way.seconds <= job.deadline;
    };
    if (std::ranges::any_of(gang_ways(job, active), in_time) || std::ranges::none_of(gang_ways(job, begins), in_time))
      continue;
    PoolCover cover{.devices = std::vector<bool>(devices.size())};
    std::vector<std::size_t> away;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      if (!accepts(job.need, d) || largest(job.kind, d) == 0) continue;
      const double here = std::max(seconds(job.kind, d, job.cost), 0.0) + load_seconds(job.kind, d);
      cover.devices[d] = in_time({.activation = begins[d], .seconds = here});
      if (cover.devices[d] && !devices[d].active) away.push_back(d);
    }
    // Active devices that are in time alone are not together. So at least one more than all of them is needed.
    const auto there = std::ranges::count(cover.devices, true) - std::ssize(away);
    const auto needed = std::max<std::int64_t>(job.gang, there + 1);
    cover.count = static_cast<std::size_t>(needed);
    count_on(away, needed - there);
    all.push_back(std::move(cover));
  }
  return all;
}

// The seconds that active devices take for what waits and could run on released ones, too, as loads() counts it.
// Infinity: they cannot run it, or nobody knows and all of them are busy.
double State::active_wait() {
  double sum = 0.0;
  if (quotas) count_use();
  const auto is_active = [](const Device& one) { return one.active; };
  const auto active = static_cast<double>(std::ranges::count_if(devices, is_active));
  for (const std::size_t at : active_lines) {
    PoolLine& line = lines[at];
    rank(line);
    if (line.released.empty() && line.bound == kNone) continue;
    const double count = quotas ? units_within_quotas(line) : units(line);
    if (!(count > 0.0)) continue;
    double rate = 0.0;
    bool idles = false;
    for (const PoolLine::Ranked& one : line.ranked) {
      rate += one.rate;
      idles |= devices[one.device].run == RunId{};
    }
    if (!(rate > 0.0) && !idles) return kNever;
    if (rate > 0.0) sum += count / rate / (line.bound == kNone ? 1.0 : active);  // others are bound to other devices
  }
  std::size_t asked = 0;
  for (auto gang = gangs.begin(); gang != gangs.end() && asked < kGangsAsked; ++gang, ++asked) {
    const Job& job = jobs.at(std::get<2>(*gang));
    if (quotas && !take_quota(job)) continue;
    std::int64_t there = 0;
    std::int64_t away = 0;
    double rate = 0.0;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      if (!accepts(job.need, d) || largest(job.kind, d) == 0) continue;
      there += devices[d].active ? 1 : 0;
      away += !devices[d].active && devices[d].activation < kNever ? 1 : 0;
      if (const double alone = seconds(job.kind, d, job.cost); devices[d].active && alone > 0.0) rate += 1.0 / alone;
    }
    if (away == 0 || there + away < job.gang) continue;
    if (there < job.gang || !(rate > 0.0)) return kNever;
    sum += static_cast<double>(job.gang) / rate;
  }
  return sum;
}

// Notes which released devices deadlines need, and says so if these are more than before, or if others begin to wait
// for too long.
void State::count_on_released(PoolDecisions& out) {
  const std::int64_t before = std::exchange(counted_on, 0);
  if (std::ranges::none_of(devices,
                           [](const Device& one) { return std::min(one.activation, one.counted_since) < kNever; }))
    return;
  std::vector<double> since(devices.size(), kNever);
  (void)deadline_covers([&](const std::vector<std::size_t>& away, std::int64_t more) {
    counted_on += more;
    for (const std::size_t d : away) {
      out.wants_devices |= devices[d].counted_since == kNever;
      since[d] = std::min(devices[d].counted_since, last_now);
    }
  });
  const bool was_behind = std::exchange(behind, most_wait < kNever && active_wait() > most_wait);
  out.wants_devices |= counted_on > before || (behind && !was_behind);
  for (std::size_t d = 0; d < devices.size(); ++d) devices[d].counted_since = since[d];
}

}  // namespace paceline::plan

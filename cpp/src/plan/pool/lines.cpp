// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

PoolLine& State::line_of(const Job& job, std::size_t bound) {
  const bool background = job.background;
  const auto [place, fresh] = line_index.try_emplace({job.kind, job.need, bound, background}, lines.size());
  if (fresh) {
    if (free_lines.empty()) {
      lines.emplace_back();
    } else {
      place->second = free_lines.back();
      free_lines.pop_back();
    }
    lines[place->second] = {.kind = job.kind,
                            .need = job.need,
                            .bound = bound,
                            .background = background,
                            .padded = kinds[job.kind].spec.padded};
    lines[place->second].fills.tags.resize(tenants.size());
  }
  return lines[place->second];
}

// A line that is no longer empty, or is again.
void State::activate(std::size_t line) { active_lines.insert(std::ranges::lower_bound(active_lines, line), line); }
void State::deactivate(std::size_t line) { active_lines.erase(std::ranges::lower_bound(active_lines, line)); }

const State::Measured& State::measured(std::size_t kind, std::size_t device) const {
  const Kind& of = kinds[kind];
  return of.on[device].known ? of.on[device] : of.classes[devices[device].cls];
}

double State::seconds(std::size_t kind, std::size_t device, double cost) const {
  const Measured& found = measured(kind, device);
  const std::span<const double> times = size_seconds(kind, device);
  if (!times.empty()) {
    const std::vector<std::int64_t>& sizes = kinds[kind].spec.sizes;
    const auto place = std::ranges::find(sizes, cost);
    if (place != sizes.end()) return times[static_cast<std::size_t>(place - sizes.begin())];
  }
  return found.known ? seconds_of(found.model, cost) : std::numeric_limits<double>::quiet_NaN();
}

double State::load_seconds(std::size_t kind, std::size_t device) const {
  const std::size_t model = kinds[kind].model;
  return model == kNone || resident(model, devices[device].space) ? 0.0 : models[model].reload_seconds;
}

void State::rank(PoolLine& line) {
  const Kind& kind = kinds[line.kind];
  if (line.epoch == epoch + kind.epoch) return;  // both only grow
  line.epoch = epoch + kind.epoch;
  line.ranked.clear();
  line.released.clear();
  line.known = line.released_known = true;
  line.on_lines = true;
  line.rate = line.released_rate = 0.0;
  line.least_seconds = kNever;
  for (std::size_t d = 0; d < devices.size(); ++d) {
    const bool here = devices[d].active;
    if ((!here && devices[d].activation == kNever) || (line.bound != kNone && line.bound != d)) continue;
    if (!accepts(line.need, d)) continue;
    const std::int64_t most = largest(line.kind, d);
    if (most == 0) continue;
    const Measured& found = measured(line.kind, d);
    bool& known = here ? line.known : line.released_known;
    known = known && found.known && kind.classes[devices[d].cls].samples >= options.samples;
    const double load = load_seconds(line.kind, d);
    const double batch = found.known ? seconds(line.kind, d, kind.cost * static_cast<double>(most)) : 0.0;
    const double rate = batch > 0.0 ? static_cast<double>(most) / batch : 0.0;
    (here ? line.rate : line.released_rate) += rate;
    (here ? line.ranked : line.released)
        .push_back({d, (found.known ? seconds(line.kind, d, kind.cost) : 0.0) + load, load, most, found.model, rate});
    if (!here) continue;
    line.on_lines = line.on_lines && size_seconds(line.kind, d).empty();
    line.least_seconds = std::min(line.least_seconds, line.ranked.back().seconds);
  }
  // What a placement binds to an active device starts on no other one.
  if (!line.ranked.empty() && binds()) line.released.clear();
  if (!line.known || line.ranked.empty()) line.least_seconds = line.rate = 0.0;
  std::stable_sort(line.ranked.begin(), line.ranked.end(),
                   [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
}

// The seconds of a job on the device that is the fastest for it.
double State::least_seconds(const PoolLine& line, const Job& job) const {
  if (!kinds[line.kind].spec.padded || !line.known || line.ranked.empty()) return line.least_seconds;
  double least = kNever;
  for (const PoolLine::Ranked& one : line.ranked) least = std::min(least, seconds_of(one.model, job.cost) + one.load);
  return least;
}

// What waits, in typical jobs of this line. Jobs of other lines count by the seconds that the box needs for them, if
// one of the devices faster than `faster` may run them: these devices will serve them, too.
double State::units_waiting(PoolLine& line, double faster) {
  double sum = units(line);
  for (const std::size_t at : active_lines) {
    PoolLine& other = lines[at];
    if (&other == &line || (other.background && !line.background)) continue;
    rank(other);
    if (!other.known || other.rate <= 0.0 || line.rate <= 0.0) continue;
    const bool shares = std::any_of(line.ranked.begin(), line.ranked.end(), [&](const PoolLine::Ranked& one) {
      return one.seconds < faster && accepts(other.need, one.device) &&
             (other.bound == kNone || other.bound == one.device);
    });
    if (shares) sum += units(other) * line.rate / other.rate;
  }
  return sum;
}

}  // namespace paceline::plan

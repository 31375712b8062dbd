// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "plan/pool/state.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::plan {

bool PoolState::has_room(std::size_t kind, std::size_t tenant) const {
  (void)state_->kinds.at(kind);
  return state_->has_room(kind, tenant);
}
const PoolOptions& PoolState::options() const noexcept { return state_->options; }
std::size_t PoolState::device_count() const noexcept { return state_->devices.size(); }
const PoolDevice& PoolState::device(std::size_t device) const { return state_->devices.at(device).spec; }
bool PoolState::active(std::size_t device) const { return state_->devices.at(device).active; }
bool PoolState::idle(std::size_t device) const { return state_->devices.at(device).run == RunId{}; }
std::size_t PoolState::kind_count() const noexcept { return state_->kinds.size(); }
const PoolKind& PoolState::kind(std::size_t kind) const { return state_->kinds.at(kind).spec; }
std::int64_t PoolState::waiting() const noexcept { return state_->waiting; }
std::int64_t PoolState::running() const noexcept { return state_->running; }
double PoolState::margin(std::size_t kind) const { return state_->kinds.at(kind).margin; }

std::int64_t PoolState::largest_batch(std::size_t kind, std::size_t device) const {
  (void)state_->kinds.at(kind);
  (void)state_->devices.at(device);
  return state_->largest(kind, device);
}

double PoolState::seconds(std::size_t kind, std::size_t device, double cost) const {
  (void)state_->kinds.at(kind);
  (void)state_->devices.at(device);
  return state_->seconds(kind, device, cost);
}

bool PoolState::resident(std::size_t device, const std::string& model) const {
  const auto& residents = state_->spaces[state_->devices.at(device).space].residents;
  return std::any_of(residents.begin(), residents.end(),
                     [&](const State::Resident& one) { return state_->models[one.model].name == model; });
}

double PoolState::used_bytes(std::size_t device) const { return state_->used(state_->devices.at(device).space); }

double PoolState::backlog_seconds() const {
  double seconds = 0.0;
  for (const std::size_t at : state_->active_lines) {
    const PoolLine& line = state_->lines[at];
    if (line.rate > 0.0 && !line.background) seconds += state_->units(line) / line.rate;
  }
  return seconds;
}

bool PoolState::lost(std::size_t device) const { return state_->devices.at(device).lost; }

std::vector<PoolLoad> PoolState::loads() const {
  const State& s = *state_;
  std::vector<PoolLoad> all(s.kinds.size());
  for (std::size_t kind = 0; kind < all.size(); ++kind) {
    const State::Kind& of = s.kinds[kind];
    all[kind].rates.resize(s.devices.size());
    if (of.forgotten) continue;
    all[kind].arrived = of.arrived;
    double sum = 0.0;
    double known = 0.0;
    std::vector<std::size_t> others;  // that can run it, and have not
    for (std::size_t d = 0; d < s.devices.size(); ++d) {
      const std::int64_t most = s.devices[d].lost ? 0 : s.largest(kind, d);
      if (most == 0) continue;
      const double batch = s.seconds(kind, d, of.cost * static_cast<double>(most));
      if (batch > 0.0) {
        sum += all[kind].rates[d] = static_cast<double>(most) / batch;
        known += 1.0;
      } else {
        others.push_back(d);
      }
    }
    for (const std::size_t d : others) all[kind].rates[d] = known > 0.0 ? sum / known : 0.0;
    all[kind].run_jobs = of.run_jobs;
    for (std::size_t d = 0; d < of.ran.size(); ++d)
      all[kind].run_work += of.ran[d].seconds * (all[kind].rates[d] > 0.0 ? all[kind].rates[d] : of.ran[d].rate);
    // Without batches the work of runs is that of their jobs, whatever the model of the seconds is off by.
    if (of.spec.sizes.back() == 1 && all[kind].run_work > 0.0) all[kind].run_work = of.run_jobs;
    all[kind].run_square = all[kind].run_work * all[kind].run_work * of.run_variation;
  }
  if (s.quotas) state_->count_use();
  for (const std::size_t at : s.active_lines) {
    const PoolLine& line = s.lines[at];
    all[line.kind].waiting += s.quotas ? state_->units_within_quotas(line) : s.units(line);
  }
  for (const auto& [background, key, id] : s.gangs) {
    const PoolEntry& job = s.jobs.at(id);
    if (!s.quotas || state_->take_quota(job)) all[job.kind].waiting += static_cast<double>(job.gang);
  }
  return all;
}

std::vector<PoolCover> PoolState::covers(double since_seconds) const {
  const State& s = *state_;
  std::vector<PoolCover> all = state_->deadline_covers([](const auto&, std::int64_t) {});
  const auto add = [&](const auto& can, std::size_t count) {
    PoolCover cover{.devices = std::vector<bool>(s.devices.size()), .count = count};
    bool any = count == 1;  // whichever is active will do
    for (std::size_t d = 0; d < s.devices.size(); ++d) {
      cover.devices[d] = !s.devices[d].lost && can(d);
      any = any && (cover.devices[d] || s.devices[d].lost);
    }
    if (!any) all.push_back(std::move(cover));
  };
  if (s.quotas) state_->count_use();
  for (const std::size_t at : s.active_lines) {
    const PoolLine& line = s.lines[at];
    if (s.quotas && !s.someone_may_start(line)) continue;
    add(
        [&](std::size_t d) {
          return (line.bound == kNone || line.bound == d) && s.accepts(line.need, d) && s.largest(line.kind, d) > 0;
        },
        1);
  }
  for (const auto& [background, key, id] : s.gangs) {
    const PoolEntry& job = s.jobs.at(id);
    if (s.quotas && !s.may_start(job.tenant, {key, id}, job.kind, job.gang, 1)) continue;
    add([&](std::size_t d) { return s.accepts(job.need, d) && s.largest(job.kind, d) > 0; },
        static_cast<std::size_t>(job.gang));
  }
  for (std::size_t need = 1; need < s.needs_used.size(); ++need) {
    if (s.needs_used[need] >= since_seconds) add([&](std::size_t d) { return s.accepts(need, d); }, 1);
  }
  return all;
}

std::vector<PoolShortage> PoolState::shortages() const {
  const State& s = *state_;
  std::vector<PoolShortage> all;
  const auto add = [&](PoolShortage one, const auto& can) {
    for (std::size_t d = 0; d < s.devices.size(); ++d) {
      if (s.devices[d].lost || !can(d)) continue;
      if (s.devices[d].active) {
        ++one.active;
      } else {
        one.away.push_back(d);
      }
    }
    if (one.active >= one.gang) return;
    const auto same = std::find_if(all.begin(), all.end(), [&](const PoolShortage& other) {
      return other.kind == one.kind && other.gang == one.gang && other.away == one.away;
    });
    if (same == all.end()) {
      all.push_back(std::move(one));
    } else {
      same->jobs += one.jobs;
    }
  };
  for (const std::size_t at : s.active_lines) {
    const PoolLine& line = s.lines[at];
    add({.kind = line.kind, .jobs = line.size()}, [&](std::size_t d) {
      return (line.bound == kNone || line.bound == d) && s.accepts(line.need, d) && s.largest(line.kind, d) > 0;
    });
  }
  for (const auto& [background, key, id] : s.gangs) {
    const PoolEntry& job = s.jobs.at(id);
    add({.kind = job.kind, .gang = job.gang, .jobs = 1},
        [&](std::size_t d) { return s.accepts(job.need, d) && s.largest(job.kind, d) > 0; });
  }
  return all;
}

std::string PoolState::describe(const PoolDecline& decline) const {
  const std::string& device = state_->devices.at(decline.device).spec.name;
  const std::string& kind = state_->kinds.at(decline.kind).spec.name;
  const std::string leaves = fmt::format("{} leaves '{}' waiting: ", device, kind);
  switch (decline.reason) {
    case PoolReason::faster_devices:
      return leaves + fmt::format(
                          "faster devices that are busy now will end it sooner ({:.3g} waiting, it takes one from "
                          "more than {:.3g} on)",
                          decline.waiting, decline.threshold);
    case PoolReason::deadline:
      return leaves + "it cannot end any of them before its deadline";
    case PoolReason::filling:
      return leaves + "the batch may still become larger within its max_delay";
    case PoolReason::reserved:
      return leaves + "it is reserved for a gang, and would be late for it";
    case PoolReason::memory:
      return leaves + "the model does not fit into its memory beside what runs there";
    case PoolReason::foreground:
      return leaves + "background work waits while other work waits for this device";
    case PoolReason::quota:
      return leaves + "their tenants use as much as their quotas allow";
    case PoolReason::chosen_otherwise:
      return leaves + "the user's placement chose another device, or to wait";
    default:
      return leaves + "no reason is known";
  }
}

std::string PoolState::describe(const PoolShortage& shortage) const {
  std::vector<std::string> away;
  for (const std::size_t device : shortage.away) away.push_back(state_->devices.at(device).spec.name);
  const std::string names = fmt::format("{}", fmt::join(away, ", "));
  const std::string text = fmt::format("'{}': {} for ", state_->kinds.at(shortage.kind).spec.name,
                                       plural(shortage.jobs, "job waits", "jobs wait"));
  const char* const take = away.size() == 1 ? "takes" : "take";
  if (shortage.gang == 1) return text + fmt::format("{}, which {} no work now", names, take);
  return text + fmt::format("{} devices at once, and {} work now: {} {} none", shortage.gang,
                            plural(shortage.active, "takes", "take"), names, take);
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "plan/pool/state.hpp"
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
    if (line.rate > 0.0) seconds += state_->units(line) / line.rate;
  }
  return seconds;
}

PoolLoad PoolState::load(std::size_t kind) const {
  const State& s = *state_;
  const State::Kind& of = s.kinds.at(kind);
  PoolLoad load{.rates = std::vector<double>(s.devices.size())};
  if (of.forgotten) return load;
  load.arrived = of.arrived / of.cost;
  load.waiting = static_cast<double>(of.held);
  for (std::size_t d = 0; d < s.devices.size(); ++d) {
    const std::int64_t most = s.devices[d].lost ? 0 : s.largest(kind, d);
    const double batch = most > 0 ? s.seconds(kind, d, of.cost * static_cast<double>(most)) : 0.0;
    if (batch > 0.0) load.rates[d] = static_cast<double>(most) / batch;
  }
  return load;
}

std::vector<bool> PoolState::awaited() const {
  const State& s = *state_;
  std::vector<bool> found(s.devices.size());
  const auto look = [&](std::size_t kind, std::size_t need, std::size_t bound, std::size_t enough) {
    const auto can = [&](std::size_t d) {
      return !s.devices[d].lost && (bound == kNone || bound == d) && s.accepts(need, d) && s.largest(kind, d) > 0;
    };
    std::size_t active = 0;
    for (std::size_t d = 0; d < s.devices.size(); ++d) active += s.devices[d].active && can(d) ? 1 : 0;
    for (std::size_t d = 0; d < s.devices.size() && active < enough; ++d) {
      if (s.devices[d].active || !can(d)) continue;
      found[d] = true;
      ++active;
    }
  };
  for (const std::size_t at : s.active_lines) look(s.lines[at].kind, s.lines[at].need, s.lines[at].bound, 1);
  for (const auto& [background, key, id] : s.gangs) {
    const PoolEntry& job = s.jobs.at(id);
    look(job.kind, job.need, kNone, static_cast<std::size_t>(job.gang));
  }
  return found;
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

}  // namespace paceline::plan

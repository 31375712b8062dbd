// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/pool.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/pool/ledger.hpp"
#include "plan/pool/state.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

template <class Items>
std::size_t known(const Items& items, std::size_t index, const char* what) {
  require(index < items.size(), "{} {} is not in the pool, which has {}", what, index, items.size());
  return index;
}

bool satisfies(const PoolNeed& need, const PoolDevice& device) {
  const auto has = [&](const std::string& label) {
    return label == device.name || label == device.device_class ||
           std::find(device.labels.begin(), device.labels.end(), label) != device.labels.end();
  };
  return std::all_of(need.labels.begin(), need.labels.end(), has) && (!need.accepts || need.accepts(device));
}

void advance(PoolState::State& state, double now) {
  require(std::isfinite(now), "now is {}; it must be a finite number of seconds", now);
  require(now >= state.last_now, "now is {}, before the pool's last event at {}; times must not decrease", now,
          state.last_now);
  state.last_now = now;
}

// The run is over, or never began: its devices are free. What it was is valid until the device starts another one.
const PoolState::State::Run& take_off(PoolState::State& state, double now, RunId run) {
  const std::size_t first = PoolState::State::first_device(run);
  require(run != RunId{} && first < state.devices.size() && state.devices[first].run == run, "run {} does not run",
          static_cast<std::uint64_t>(run));
  advance(state, now);
  const PoolState::State::Run& taken = state.devices[first].current;
  --state.running;
  for (const std::size_t d : taken.devices) {
    state.devices[d].run = RunId{};
    if (state.devices[d].active) ++state.idle;
    if (taken.bound) state.devices[d].bound -= std::ssize(taken.jobs);
  }
  return taken;
}

void stop(PoolState::State& state, double now, std::size_t device) {
  PoolState::State::Device& one = state.devices[device];
  if (!one.active) return;
  one.active = false;
  one.declines_since = kNever;
  if (one.run == RunId{}) --state.idle;
  ++state.epoch;
  state.rebind(device, now);
}

}  // namespace

std::vector<std::int64_t> batch_sizes(std::int64_t most) {
  require(most >= 1, "the largest batch is {}; it must be at least 1", most);
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1, power = 1; size < most; size += std::max<std::int64_t>(power / 4, 1)) {
    sizes.push_back(size);
    power = size >= 2 * power ? 2 * power : power;
  }
  sizes.push_back(most);
  return sizes;
}

PoolState::PoolState(PoolOptions options) : state_(std::make_unique<State>()) {
  require((options.placement == Placement::custom) == static_cast<bool>(options.choose),
          "PoolOptions::choose is needed with Placement::custom, and only then");
  require(finite_not_negative(options.decline), "decline is {}; it must be finite and not negative", options.decline);
  require(options.probe_seconds > 0.0, "probe_seconds is {}; it must be positive", options.probe_seconds);
  require(options.samples >= 0, "samples is {}; it cannot be negative", options.samples);
  require(std::isfinite(options.margin) && options.margin > 0.0, "margin is {}; it must be positive", options.margin);
  require(finite_not_negative(options.memory_margin_bytes), "memory_margin_bytes is {}; it cannot be negative",
          options.memory_margin_bytes);
  require(options.patience.size() == 4 &&
              std::all_of(options.patience.begin(), options.patience.end(), finite_not_negative),
          "patience needs four numbers of seconds that are not negative, one for each priority");
  state_->options = std::move(options);
}

PoolState::PoolState(const PoolState& other) : state_(std::make_unique<State>(*other.state_)) {
  state_->ledger = nullptr;
}
PoolState& PoolState::operator=(const PoolState& other) {
  if (this != &other) *this = PoolState(other);
  return *this;
}
PoolState::PoolState(PoolState&&) noexcept = default;
PoolState& PoolState::operator=(PoolState&&) noexcept = default;
PoolState::~PoolState() = default;

std::size_t PoolState::add_need(PoolNeed need) {
  State& s = *state_;
  std::vector<char> row;
  for (const State::Device& device : s.devices) row.push_back(satisfies(need, device.spec) ? 1 : 0);
  s.accepted.push_back(std::move(row));
  s.needs.push_back(std::move(need));
  s.find_sets(s.needs.size() - 1);
  if (s.ledger != nullptr) s.ledger->add_need(s.accepted.back());
  return s.needs.size() - 1;
}

PoolDecisions PoolState::add_device(double now_seconds, PoolDevice device) {
  State& s = *state_;
  require(finite_not_negative(device.weight), "the weight of {} is {}; it must be finite and not negative", device.name,
          device.weight);
  require(device.memory_bytes > 0.0, "the memory of {} is {} bytes; it must be positive", device.name,
          device.memory_bytes);
  if (device.shares_memory_of) (void)known(s.devices, *device.shares_memory_of, "device");
  advance(s, now_seconds);
  State::Device made{.spec = std::move(device)};
  const auto cls = std::ranges::find(s.classes, made.spec.device_class);
  made.cls = static_cast<std::size_t>(cls - s.classes.begin());
  if (cls == s.classes.end()) s.classes.push_back(made.spec.device_class);
  made.space = made.spec.shares_memory_of ? s.devices[*made.spec.shares_memory_of].space : s.spaces.size();
  if (made.space == s.spaces.size()) s.spaces.push_back({.bytes = made.spec.memory_bytes});
  for (std::size_t i = 0; i < s.needs.size(); ++i) s.accepted[i].push_back(satisfies(s.needs[i], made.spec) ? 1 : 0);
  for (State::Kind& kind : s.kinds) {
    kind.on.emplace_back();
    kind.classes.resize(s.classes.size());
  }
  s.devices.push_back(std::move(made));
  s.find_sets(0);
  for (std::size_t k = 0; k < s.kinds.size(); ++k) s.add_largest(k, s.devices.size() - 1);
  ++s.idle;
  ++s.epoch;
  PoolDecisions out;
  s.settle(now_seconds, out);
  if (s.ledger != nullptr) {
    std::vector<char> accepted;
    for (std::size_t need = 1; need < s.needs.size(); ++need) accepted.push_back(s.accepted[need].back());
    s.ledger->add_device(now_seconds, s.devices.back().spec, accepted, out);
  }
  return out;
}

PoolDecisions PoolState::submit(double now_seconds, const PoolJob& job, JobId& id) {
  State& s = *state_;
  State::Kind& kind = s.kind_at(job.kind);
  (void)known(s.needs, job.need, "need");
  (void)known(s.tenants, job.tenant, "tenant");
  require(job.deadline_seconds > 0.0, "the deadline is {} s; it must be positive", job.deadline_seconds);
  require(finite_not_negative(job.not_before_seconds), "not_before is {} s; it must be finite and not negative",
          job.not_before_seconds);
  require(job.cost > 0.0 && job.cost <= 1e12, "cost is {}; it must be above 0, and at most 1e12", job.cost);
  require(kind.spec.padded || job.cost == 1.0, "cost is {}, but kind '{}' is not padded: its jobs all cost 1", job.cost,
          kind.spec.name);
  require(job.charge >= 0.0 && job.charge <= 1e12, "charge is {}; it must be from 0 to 1e12", job.charge);
  require(job.gang >= 1, "gang is {}; a job runs on at least one device", job.gang);
  for (const JobId one : job.after)
    require(s.jobs.submitted(one), "the job waits for job {}, which was never submitted",
            static_cast<std::uint64_t>(one));
  advance(s, now_seconds);
  if (kind.spec.padded) s.typical(kind, job.cost);
  id = s.jobs.next();
  PoolDecisions out;
  State::Job made{.id = id, .kind = job.kind, .need = job.need, .gang = job.gang, .submitted = now_seconds};
  made.due = now_seconds + job.not_before_seconds;
  made.deadline = now_seconds + job.deadline_seconds;
  made.key = made.timed() ? made.deadline : made.due + s.options.patience[static_cast<std::size_t>(job.priority)];
  made.cost = job.cost;
  made.charge = job.charge > 0.0 ? job.charge : job.cost * static_cast<double>(job.gang);
  made.background = job.priority == Priority::background;
  made.priority = job.priority;
  made.tenant = static_cast<std::uint32_t>(job.tenant);
  PoolReason refused = PoolReason::none;
  if (!s.has_room(job.kind, job.tenant) || s.jobs.full()) refused = PoolReason::queue_full;
  if (s.quotas && !s.within_quota(made)) refused = PoolReason::quota;
  if (!s.can_run(made)) refused = PoolReason::no_device;
  if (refused == PoolReason::none && !s.admits(made, now_seconds)) refused = PoolReason::deadline;
  if (refused != PoolReason::no_device && refused != PoolReason::quota) {
    if (!s.has_quota(made)) s.use_need(job.need, now_seconds + job.not_before_seconds);
    if (refused != PoolReason::none && job.not_before_seconds <= 0.0 && job.after.empty()) s.turn_away(made);
  }
  if (refused != PoolReason::none) {
    out.ends.push_back({id, JobOutcome::rejected, refused, std::nullopt});
  } else {
    for (const JobId one : job.after) {
      State::Job* before = s.jobs.find(one);
      if (before == nullptr) continue;
      ++made.blockers;
      before->dependents.push_back(id);
    }
    s.hold(made, 1);
    if (s.has_tenants) s.turn_of(id) = {};
    State::Job& stored = s.jobs.add(std::move(made));
    if (stored.blockers == 0 && job.not_before_seconds <= 0.0) {
      s.enqueue(stored, now_seconds);
    } else {
      if (job.not_before_seconds > 0.0) s.starts_at.emplace(stored.due, id);
      if (stored.timed()) s.held_deadlines.emplace(stored.deadline, id);
    }
  }
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.submit(now_seconds, job, id, out); });
  return out;
}

PoolDecisions PoolState::finish(double now_seconds, RunId run, RunResult result, double seconds) {
  State& s = *state_;
  require(result != RunResult::completed || finite_not_negative(seconds),
          "run {} took {} s; that must be finite and not negative", static_cast<std::uint64_t>(run), seconds);
  const State::Run& ended = take_off(s, now_seconds, run);
  PoolDecisions out;
  if (result == RunResult::completed) {
    State::Kind& kind = s.kinds[ended.kind];
    for (const std::size_t d : ended.devices) ++kind.classes[s.devices[d].cls].samples;
    if (kind.classes[s.devices[ended.devices.front()].cls].samples <= s.options.samples) ++kind.epoch;
    if (ended.predicted > 0.0) s.observe(kind, seconds / ended.predicted);
    if (seconds > 0.0) s.note_run(kind, ended, seconds);
    const bool batches = ended.devices.size() == 1 && !kind.spec.padded && kind.spec.sizes.size() > 1;
    if (batches && seconds > 0.0) s.note_size(kind, ended, seconds);  // 0: nothing was measured
    out.ends.reserve(ended.jobs.size());
    for (const JobId id : ended.jobs) s.end(id, JobOutcome::completed, PoolReason::none, std::nullopt, out);
  } else {
    s.ended_badly(ended, result, now_seconds, out);
  }
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.finish(now_seconds, run, result, seconds, out); });
  return out;
}

PoolDecisions PoolState::withdraw(double now_seconds, RunId run, std::optional<JobId> cancelled) {
  State& s = *state_;
  const State::Run& taken = take_off(s, now_seconds, run);
  PoolDecisions out;
  for (const JobId id : taken.jobs) {
    State::Job& job = s.jobs.at(id);
    if (s.has_tenants) s.refund(job);
    if (id == cancelled) {
      s.end(id, JobOutcome::cancelled, PoolReason::on_request, std::nullopt, out);
    } else if (s.can_run(job)) {
      s.again(job, now_seconds);
    } else {
      s.end(id, JobOutcome::failed, PoolReason::device_lost, std::nullopt, out);
    }
  }
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.withdraw(now_seconds, run, cancelled, out); });
  return out;
}

PoolDecisions PoolState::cancel(double now_seconds, JobId job, bool& cancelled) {
  State& s = *state_;
  advance(s, now_seconds);
  PoolDecisions out;
  const State::Job* found = s.jobs.find(job);
  cancelled = found != nullptr && found->phase != State::Job::Phase::runs;
  if (cancelled) s.end(job, JobOutcome::cancelled, PoolReason::on_request, std::nullopt, out);
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.cancel(now_seconds, job, out); });
  return out;
}

PoolDecisions PoolState::retire(double now_seconds, std::size_t device, bool paused, double activation_seconds) {
  State& s = *state_;
  State::Device& one = s.devices[known(s.devices, device, "device")];
  require(activation_seconds >= 0.0, "activation_seconds is {}; it cannot be negative", activation_seconds);
  advance(s, now_seconds);
  one.paused = paused;
  one.activation = activation_seconds;
  ++s.epoch;
  stop(s, now_seconds, device);
  PoolDecisions out;
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.retire(now_seconds, device, paused, activation_seconds, out); });
  return out;
}

PoolDecisions PoolState::restore(double now_seconds, std::size_t device) {
  State& s = *state_;
  State::Device& one = s.devices[known(s.devices, device, "device")];
  advance(s, now_seconds);
  one.lost = one.paused = false;
  one.activation = kNever;
  s.behind = false;  // it may not be enough
  if (!one.active) {
    one.active = true;
    if (one.run == RunId{}) ++s.idle;
    ++s.epoch;
  }
  PoolDecisions out;
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.restore(now_seconds, device, out); });
  return out;
}

PoolDecisions PoolState::lose(double now_seconds, std::size_t device) {
  State& s = *state_;
  (void)known(s.devices, device, "device");
  advance(s, now_seconds);
  PoolDecisions out;
  s.devices[device].lost = true;
  s.devices[device].paused = false;
  s.devices[device].activation = kNever;
  s.behind = false;  // another one may have to come
  s.fail_stranded(std::nullopt, PoolReason::device_lost, out);
  stop(s, now_seconds, device);
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.lose(now_seconds, device, out); });
  return out;
}

PoolDecisions PoolState::measure(double now_seconds, std::size_t device, std::size_t kind, const CostModel& model,
                                 std::int64_t samples) {
  State& s = *state_;
  const std::size_t cls = s.devices[known(s.devices, device, "device")].cls;
  State::Kind& of = s.kind_at(kind);
  require(samples >= 1, "samples is {}; a model comes from at least one run", samples);
  advance(s, now_seconds);
  State::Measured& on = of.on[device];
  on = {model, samples, true, std::move(on.times)};
  on.times.compare(model, of.spec.sizes);
  of.classes[cls] = {model, std::max(samples, of.classes[cls].samples), true};
  ++of.epoch;
  PoolDecisions out;
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.measure(now_seconds, device, kind, model, samples, out); });
  return out;
}

PoolDecisions PoolState::loaded(double now_seconds, std::size_t kind, double seconds) {
  State& s = *state_;
  const std::size_t model = s.kind_at(kind).model;
  require(model != kNone, "kind '{}' has no model", s.kinds[kind].spec.name);
  require(finite_not_negative(seconds), "the load took {} s; that must be finite and not negative", seconds);
  advance(s, now_seconds);
  s.models[model].reload_seconds = seconds;
  s.models[model].loaded = true;
  ++s.epoch;
  PoolDecisions out;
  s.settle(now_seconds, out);
  s.note([&](PoolLedger& ledger) { ledger.loaded(now_seconds, kind, seconds, out); });
  return out;
}

void PoolState::want_above(double wait_seconds) noexcept { state_->most_wait = wait_seconds; }

PoolDecisions PoolState::tick(double now_seconds) {
  advance(*state_, now_seconds);
  PoolDecisions out;
  state_->settle(now_seconds, out);
  state_->note([&](PoolLedger& ledger) { ledger.tick(now_seconds, out); });
  return out;
}

}  // namespace paceline::plan

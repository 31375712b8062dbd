// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/balancer.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <utility>

#include <paceline/error.hpp>

#include "balance/balancer_state.hpp"
#include "balance/bounded.hpp"
#include "balance/target.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kIncumbentsKept = 64;  // batch sizes; sequences with lengths have thousands

void check(const BalancerOptions& options) {
  if (options.devices.empty()) refuse("a balancer needs at least one device");
  const bool chosen = options.granularity == 0 && options.policy == Balance::automatic;
  if (options.granularity < 1 && !chosen) {
    refuse(
        "granularity is {}: shares are multiples of at least one item; 0, for \"auto\" only, has it chosen "
        "by the batch",
        options.granularity);
  }
}

void check(const StepTimings& timings, const BalancerOptions& options) {
  if (timings.devices.size() != options.devices.size())
    refuse("timings of {} devices for a balancer of {}", timings.devices.size(), options.devices.size());
  const auto sane = [](double seconds) { return std::isfinite(seconds) && seconds >= 0.0; };
  if (!sane(timings.step_seconds)) refuse("step_seconds is {}", timings.step_seconds);
  if (!sane(timings.reduction_seconds)) refuse("reduction_seconds is {}", timings.reduction_seconds);
  if (!timings.startup_seconds.empty() && timings.startup_seconds.size() != options.devices.size()) {
    refuse("startup_seconds of {} devices for a balancer of {}; give all or none", timings.startup_seconds.size(),
           options.devices.size());
  }
  for (std::size_t i = 0; i < timings.startup_seconds.size(); ++i) {
    const std::optional<double>& seconds = timings.startup_seconds[i];
    if (!seconds || sane(*seconds)) continue;
    const std::string& name = options.devices[i].name;
    throw InvalidArgument(fmt::format("{} reports a start {} s after the first one", name, *seconds), name);
  }
  if (!timings.lent_parts.empty() && timings.lent_parts.size() != options.devices.size()) {
    refuse("lent_parts of {} devices for a balancer of {}; give all or none", timings.lent_parts.size(),
           options.devices.size());
  }
  for (std::size_t i = 0; i < timings.lent_parts.size(); ++i) {
    const double part = timings.lent_parts[i];
    if (part >= 0.0 && part <= 1.0) continue;
    const std::string& name = options.devices[i].name;
    throw InvalidArgument(fmt::format("{} reports that it lent {} of its time; a part is from 0 to 1", name, part),
                          name);
  }
  for (std::size_t i = 0; i < timings.devices.size(); ++i) {
    for (const MicroBatchTiming& timing : timings.devices[i]) {
      if (sane(timing.seconds) && timing.items >= 0) continue;
      const std::string& name = options.devices[i].name;
      throw InvalidArgument(fmt::format("{} reports {} s for {} items", name, timing.seconds, timing.items), name);
    }
  }
}

std::vector<double> given_startup(const BalancerOptions& options) {
  std::vector<double> seconds;
  for (const DeviceProfile& device : options.devices) seconds.push_back(device.limits.startup_seconds);
  return seconds;
}

std::vector<std::size_t> classes_of(const Estimator& estimator, std::size_t count) {
  std::vector<std::size_t> classes;
  for (std::size_t i = 0; i < count; ++i) classes.push_back(estimator.class_of(i));
  return classes;
}

}  // namespace

std::int64_t usual_batch_size(std::span<const std::int64_t> batch_sizes) {
  if (batch_sizes.empty()) throw InvalidArgument("usual_batch_size: there are no batch sizes; give at least one");
  std::map<std::int64_t, int, std::greater<>> counts;
  for (const std::int64_t size : batch_sizes) ++counts[size];
  const auto most = std::ranges::max_element(counts, {}, [](const auto& one) { return one.second; });
  return most->second > 1 && 4 * most->second >= std::ssize(batch_sizes) ? most->first : batch_sizes.back();
}

Balancer::State::State(BalancerOptions given)
    : options(std::move(given)),
      estimator(options.devices, options.proportional),
      reduction(options.reduction_seconds, options.devices.size()),
      startup(given_startup(options)),
      lent(options.devices.size()),
      sizes(classes_of(estimator, options.devices.size())) {
  check(options);
  for (const DeviceProfile& device : options.devices) limits.push_back(device.limits);
  retired.assign(options.devices.size(), false);
  ratios = fixed_ratios(options);
  if (ratios.empty()) automatic.emplace(options);
}

PolicyContext Balancer::State::context(std::int64_t batch_size) const {
  const auto incumbent = incumbents.find(batch_size);
  return {.options = options,
          .estimator = estimator,
          .startup = startup,
          .lent = lent,
          .sizes = sizes,
          .limits = limits,
          .reduction_seconds = reduction.seconds(),
          .step = step,
          .batch_size = batch_size,
          .granularity = granularity_of(options, batch_size),
          .incumbent = incumbent == incumbents.end() ? nullptr : &incumbent->second.shares,
          .hints = hints.empty() ? nullptr : &hints};
}

void Balancer::State::fit_limits(std::int64_t batch_size) {
  const std::int64_t least = std::min(least_items, batch_size);
  for (std::size_t i = 0; i < limits.size(); ++i) {
    if (retired[i]) continue;
    limits[i].minimum = std::max(options.devices[i].limits.minimum, least > 1 ? least : 0);
  }
}

bool Balancer::State::respects_limits(const std::vector<std::int64_t>& shares) const {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] > 0 && shares[i] < limits[i].minimum) return false;
  }
  return true;
}

Proposal Balancer::State::propose(std::int64_t batch_size) {
  if (automatic) return automatic->propose(context(batch_size));
  return {split_by_weights(context(batch_size), ratios),
          options.policy == Balance::even ? "even, as asked" : "by the given ratios"};
}

StepPlan Balancer::State::make_plan(std::int64_t batch_size) {
  fit_limits(batch_size);
  Proposal proposal = propose(batch_size);
  if (!respects_limits(proposal.shares) || !respects_limits(proposal.in_force)) {
    // These shares were planned before the least items were raised.
    incumbents.erase(batch_size);
    if (automatic) automatic->reset();
    proposal = propose(batch_size);
  }
  StepPlan made;
  made.step = step;
  made.batch_size = batch_size;
  made.granularity = granularity_of(options, batch_size);
  made.reason = std::move(proposal.reason);
  const auto incumbent = incumbents.find(batch_size);
  made.moved = incumbent != incumbents.end() && incumbent->second.planned != proposal.shares;
  made.shares = std::move(proposal.shares);
  for (const DeviceEstimate& device : estimator.devices()) made.noise.push_back(device.noise);
  if (estimator.has_evidence()) {
    made.models = estimated_models(context(batch_size));
    made.predicted_seconds = makespan(context(batch_size), made.models, made.shares);
  }
  // The cost of a correction is unknown before one has run. If it may be small, one is tried.
  for (std::size_t i = 0; i < made.models.size(); ++i) {
    if (is_little_known(estimator, i)) made.models[i] = with_fixed_part(context(batch_size), i, -2.0);
  }
  make_room(incumbents, batch_size, kIncumbentsKept, [](const Incumbent& one) { return one.last_used; });
  incumbents[batch_size] = {proposal.in_force.empty() ? made.shares : std::move(proposal.in_force), made.shares, step};
  return made;
}

/// Plans in force are of other devices, or of devices about which something else was known.
void Balancer::State::devices_changed() {
  incumbents.clear();
  waits.clear();
  batch_sizes.clear();
  awaiting_record = false;
  if (automatic) automatic->reset();
}

double Balancer::State::possible_gain() const {
  if (!usual || !estimator.has_evidence()) return 0.0;
  const PolicyContext here = context(usual->batch_size);
  const std::vector<plan::CostModel> models = estimated_models(here);
  const double now = makespan(here, models, usual->shares);
  const plan::Split best = plan::split_batch(usual->batch_size, models, split_options(here));
  return now > 0.0 ? std::max(0.0, 1.0 - makespan(here, models, best.shares) / now) : 0.0;
}

Balancer::Balancer(BalancerOptions options) : state_(std::make_unique<State>(std::move(options))) {}
Balancer::~Balancer() = default;
Balancer::Balancer(Balancer&&) noexcept = default;
Balancer& Balancer::operator=(Balancer&&) noexcept = default;

StepPlan Balancer::next_plan(std::int64_t batch_size) {
  State& state = *state_;
  if (batch_size < 1) refuse("the batch has {} items: it must have at least one", batch_size);
  const bool again = state.awaiting_record && state.plan->batch_size == batch_size;
  if (!again) {
    StepPlan made = state.make_plan(batch_size);
    if (made.moved) ++state.moves;
    state.plan = std::move(made);
    keep_last(state.batch_sizes, batch_size, kRecentPlans);
    if (batch_size == usual_batch_size(state.batch_sizes)) state.usual = state.plan;
    state.awaiting_record = true;
  }
  state.called = true;
  if (state.ledger) state.ledger->plan(*state.plan);
  return *state.plan;
}

void Balancer::record(const StepTimings& timings) {
  State& state = *state_;
  if (!state.awaiting_record) refuse("record without a plan: call next_plan before each step");
  check(timings, state.options);
  if (state.ledger) state.ledger->record(state.step, timings);
  state.awaiting_record = false;
  state.estimator.record(state.step, timings);
  state.sizes.record(state.plan->shares, timings);
  std::vector<bool> worked;
  for (const auto& runs : timings.devices) worked.push_back(!runs.empty());
  const auto working = static_cast<std::size_t>(std::ranges::count(worked, true));
  state.lent.record(timings.lent_parts, worked);
  double seconds = any_excluded(timings) ? 0.0 : seconds_of(timings);  // 0: it compares with no other step
  if (seconds > 0.0) {
    state.startup.record(timings.startup_seconds, seconds);
    for (std::size_t i = 0; i < state.limits.size(); ++i) state.limits[i].startup_seconds = state.startup.seconds(i);
    state.reduction.record(working, timings.reduction_seconds, seconds);
    // What a move saves in the reduction is part of its gain.
    const std::vector<double>& reductions = state.reduction.seconds();
    const double believed = working < reductions.size() ? reductions[working] : 0.0;
    seconds += timings.reduction_seconds > 0.0 ? timings.reduction_seconds : believed;
    const double predicted = state.plan->predicted_seconds;
    if (working > 1 && predicted > 0.0) keep_last(state.waits, seconds / predicted, kRecentPlans);
  }
  if (state.automatic) state.automatic->observe(state.context(state.plan->batch_size), timings, seconds);
  ++state.step;
}

void Balancer::retire(std::size_t device) {
  State& state = *state_;
  if (retired(device)) return;
  if (std::count(state.retired.begin(), state.retired.end(), false) == 1) {
    const std::string& name = state.options.devices[device].name;
    throw InvalidArgument(fmt::format("{} is the last device: it cannot be retired", name), name);
  }
  if (state.ledger) state.ledger->retire(device);
  state.retired[device] = true;
  state.limits[device] = {.minimum = 0, .maximum = 0};
  state.lent.forget(device);
  state.devices_changed();
}

void Balancer::restore(std::size_t device) {
  State& state = *state_;
  if (!retired(device)) return;
  if (state.ledger) state.ledger->restore(device);
  state.retired[device] = false;
  state.limits[device] = state.options.devices[device].limits;
  state.limits[device].startup_seconds = state.startup.seconds(device);
  state.devices_changed();
}

bool Balancer::retired(std::size_t device) const {
  const State& state = *state_;
  if (device >= state.limits.size()) refuse("there is no device {}: there are {}", device, state.limits.size());
  return state.retired[device];
}

void Balancer::hint(std::span<const std::optional<plan::CostModel>> models) {
  State& state = *state_;
  if (models.size() != state.options.devices.size()) {
    refuse("hint: {} for a balancer of {}; give one per device, or none for a device", plural(models.size(), "model"),
           plural(state.options.devices.size(), "device"));
  }
  if (state.estimator.has_evidence()) return;
  std::vector<plan::CostModel> hints = completed_models(models, classes_of(state.estimator, models.size()));
  if (hints.empty()) return;
  state.hints = std::move(hints);
  state.hinted.assign(models.begin(), models.end());
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (models[i] && models[i]->per_item_seconds() > 0.0) state.estimator.hint(i, *models[i]);
  }
  if (state.ledger) state.ledger->hint(state.hinted);
  state.devices_changed();
}

void Balancer::set_least_items(std::int64_t items) {
  State& state = *state_;
  if (items < 1) refuse("least_items is {}: a share has at least one item", items);
  if (items == state.least_items) return;
  if (state.ledger) state.ledger->least_items(items);
  state.least_items = items;
  state.awaiting_record = false;
}

const BalancerOptions& Balancer::options() const noexcept { return state_->options; }

std::int64_t Balancer::least_items() const noexcept { return state_->least_items; }

std::int64_t Balancer::move_count() const noexcept { return state_->moves; }

void Balancer::write_to(std::shared_ptr<LedgerWriter> ledger) {
  if (ledger && state_->called) refuse("a ledger must be attached before the first call");
  state_->ledger = std::move(ledger);
  if (!state_->ledger) return;
  state_->ledger->header(state_->options);
  if (state_->least_items > 1) state_->ledger->least_items(state_->least_items);
  if (!state_->hinted.empty()) state_->ledger->hint(state_->hinted);
  for (std::size_t i = 0; i < state_->retired.size(); ++i) {
    if (state_->retired[i]) state_->ledger->retire(i);
  }
}

bool Balancer::called() const noexcept { return state_->called; }

/// DeviceReport::slowdown of a device that was measured.
double Balancer::State::slowdown_of(std::size_t device) const {
  const std::vector<DeviceEstimate>& estimates = estimator.devices();
  const auto change = [](const DeviceEstimate& estimate) {
    return estimate.scale_before > 0.0 ? estimate.own_scale / estimate.scale_before : 0.0;
  };
  double least = change(estimates[device]);
  if (least <= 1.0) return least;
  for (std::size_t i = 0; i < estimates.size(); ++i) {
    if (i == device || retired[i] || estimates[i].samples == 0) continue;
    if (estimator.class_of(i) != estimator.class_of(device)) continue;
    if (estimates[i].cluster == estimates[device].cluster) least = std::min(least, std::max(1.0, change(estimates[i])));
  }
  return least;
}

BalanceReport Balancer::report() const {
  const State& state = *state_;
  BalanceReport report;
  report.policy = name_of(state.options.policy);
  report.unit = state.options.unit;
  report.steps = state.step;
  report.moves = state.moves;
  if (state.automatic) state.automatic->describe(report);
  report.possible_gain = state.possible_gain();
  if (state.usual) {
    report.last_reason = state.usual->reason;
    report.granularity = state.usual->granularity;
  }
  const std::vector<DeviceEstimate>& estimates = state.estimator.devices();
  for (std::size_t i = 0; i < estimates.size(); ++i) {
    const DeviceEstimate& estimate = estimates[i];
    DeviceReport device;
    device.name = state.options.devices[i].name;
    device.device_class = state.options.devices[i].device_class;
    device.retired = state.retired[i];
    device.measured = estimate.samples > 0;
    device.share = state.usual ? state.usual->shares[i] : 0;
    device.startup_seconds = state.startup.seconds(i);
    device.lent_part = state.lent.part(i);
    if (device.measured) {
      double fastest = estimate.scale;
      for (std::size_t j = 0; j < estimates.size(); ++j) {
        if (state.estimator.class_of(i) != state.estimator.class_of(j) || estimates[j].samples == 0) continue;
        if (estimates[j].cluster == estimate.cluster) ++device.equals;
        if (!state.retired[j]) fastest = std::min(fastest, estimates[j].scale);
      }
      const plan::CostModel model = state.estimator.model(i);
      device.speed = fastest / estimate.scale;
      device.noise = estimate.noise;
      device.error = estimate.error;
      device.fixed_seconds = model.fixed_seconds();
      device.per_item_seconds = model.per_item_seconds();
      device.fixed_error = state.estimator.shape_of(i).error();
      device.reference_items = state.estimator.shape_of(i).shape().reference_items;
      device.samples = static_cast<std::int64_t>(estimate.samples);
      device.since_step = estimate.since_step;
      device.change_points = estimate.change_points;
      device.drifts = estimate.drifts;
      device.slowdown = state.slowdown_of(i);
      if (device.slowdown > 1.0 && !device.retired && state.usual) {
        WhatIfOptions as_before;
        as_before.speeds.assign(estimates.size(), 1.0);
        as_before.speeds[i] = device.slowdown;
        const WhatIfAnswer answer = what_if(as_before);
        device.regain = std::max(0.0, 1.0 - answer.seconds / answer.best_seconds);
      }
    }
    report.devices.push_back(std::move(device));
  }
  return report;
}

}  // namespace paceline::balance

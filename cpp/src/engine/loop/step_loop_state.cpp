// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/step_loop_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include <paceline/error.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/backend.hpp>

#include "engine/step/step_pieces.hpp"

namespace paceline {
namespace {

/// A property of each device of the group.
std::vector<std::string> of_each(const DeviceGroup& group, std::string Device::* property) {
  std::vector<std::string> values;
  for (const Device& device : group.devices()) values.push_back(device.*property);
  return values;
}

/// What a step lost before its devices began: all of the time before the first one, and of the delays of the others the
/// mean weighted by their speeds. No clock knows when GPUs could have begun, only by how much later others did.
std::optional<double> launching_seconds(const observe::StepSample& sample, const StepRecord& record,
                                        bool asynchronous) {
  if (asynchronous && record.startup_seconds.empty()) return std::nullopt;
  double lost = 0.0;
  double speeds = 0.0;
  for (std::size_t d = 0; d < sample.busy_seconds.size(); ++d) {
    const double busy = sample.busy_seconds[d];
    if (busy <= 0.0) continue;
    const double speed = (sample.costs.empty() ? static_cast<double>(sample.items[d]) : sample.costs[d]) / busy;
    const double late = record.startup_seconds.empty() ? 0.0 : record.startup_seconds[d].value_or(0.0);
    lost += speed * std::clamp(record.compute_seconds - busy, 0.0, late);
    speeds += speed;
  }
  const double before = asynchronous ? 0.0 : record.step_seconds - record.compute_seconds - record.reduce_seconds;
  return std::max(before, 0.0) + (speeds > 0.0 ? lost / speeds : 0.0);
}

constexpr std::int64_t kOne = 1;
constexpr std::size_t kMostSearches = 8;  // kinds of batches that have a search for sizes, or are cut short

/// Keeps the sizes of micro-batches the same when shares move, for devices that compile, capture or choose algorithms
/// by size: with a fixed micro-batch, every share is a multiple of it, except for the rest of the batch.
StepLoopOptions with_stable_shapes(StepLoopOptions options, bool asynchronous) {
  if (asynchronous && options.micro_batch > 0 && options.granularity <= 1) options.granularity = options.micro_batch;
  if (!asynchronous || options.balance != Balance::automatic) options.granularity = std::max(options.granularity, kOne);
  return options;
}

/// The entry of this key, which is made of `arguments` when it is first asked for. Of many keys the least recently used
/// one is forgotten.
template <class Key, class Value, class... Arguments>
std::shared_ptr<Value> of_kind(std::vector<std::pair<Key, std::shared_ptr<Value>>>& entries, const Key& key,
                               const Arguments&... arguments) {
  const auto known = std::ranges::find(entries, key, [](const auto& one) { return one.first; });
  if (known == entries.end()) {
    if (entries.size() == kMostSearches) entries.erase(entries.begin());
    entries.emplace_back(key, std::make_shared<Value>(arguments...));
  } else {
    std::rotate(known, known + 1, entries.end());
  }
  return entries.back().second;
}

/// StepOptions::run_ahead for the devices of the group.
std::vector<std::int64_t> run_ahead_of(const DeviceGroup& group, const StepLoopOptions& options) {
  if (!group.asynchronous()) return {};
  std::vector<std::int64_t> run_ahead;
  for (const Device& device : group.devices()) {
    run_ahead.push_back(backend_of(device).asynchronous() ? options.run_ahead : 0);
  }
  return run_ahead;
}

/// `proportional`: see balance::BalancerOptions.
balance::Balancer make_balancer(const DeviceGroup& group, const StepLoopOptions& options, bool proportional) {
  balance::BalancerOptions balancer;
  balancer.proportional = proportional;
  if (proportional) balancer.unit = "units of work";
  balancer.policy = options.balance;
  balancer.weights = options.weights;
  balancer.granularity = proportional ? std::max(options.granularity, kOne) : options.granularity;
  for (const Device& device : group.devices()) {
    balance::DeviceProfile& profile = balancer.devices.emplace_back();
    profile.name = device.name;
    profile.device_class = device.device_class;
  }
  return balance::Balancer(std::move(balancer));
}

}  // namespace

StepLoop::State::State(const DeviceGroup& the_group, StepLoopOptions the_options)
    : group(the_group.share()),
      asynchronous(group.asynchronous()),
      overlaps(std::ranges::count_if(group.devices(), [](const Device& one) { return one.kind != DeviceKind::host; }) >
               1),
      options(with_stable_shapes(std::move(the_options), asynchronous)),
      run_ahead(run_ahead_of(group, options)),
      alike(make_balancer(group, options, false)),
      by_cost(make_balancer(group, options, true)),
      work({group.ids(), of_each(group, &Device::device_class)}, options.micro_batch,
           options.balance != Balance::automatic),
      caps(std::make_shared<internal::MemoryCaps>(group, options.memory_limits)),
      metrics(of_each(group, &Device::name)),
      health(group.devices()),
      origin(std::chrono::steady_clock::now()) {}

void StepLoop::State::check(const StepLoopOptions& options) {
  if (options.micro_batch < 0) {
    throw InvalidArgument(
        fmt::format("micro_batch is {}; give a size of at least 1, or 0 to have it planned.", options.micro_batch));
  }
  if (options.least_items < 1) {
    throw InvalidArgument(fmt::format("least_items is {}; a micro-batch has at least one.", options.least_items));
  }
  if (options.corrections == true && options.balance != Balance::automatic) {
    throw InvalidArgument("corrections need balance 'auto': the other policies never move work.");
  }
}

std::shared_ptr<const BatchPlan> StepLoop::State::next_plan(std::int64_t batch_size, const BatchKind& kind) {
  const bool again = alike.latest.batch_size == batch_size && alike.balancer.least_items() == least_items();
  collect(again ? kMostPending - 1 : 0);
  alike.balancer.set_least_items(least_items());
  auto made = std::make_shared<BatchPlan>();
  made->size = batch_size;
  made->kind = kind;
  made->devices = group.ids();
  made->balance = alike.decide(batch_size, ledger);
  made->shares = made->balance.shares;
  last = &alike;
  return plan = std::move(made);
}

std::shared_ptr<const BatchPlan> StepLoop::State::next_plan(std::span<const double> costs) {
  collect(by_cost.latest.batch_size == work.batch_units(costs) ? kMostPending - 1 : 0);
  balance::StepPlan decided = by_cost.decide(work.begin(costs), ledger);
  last = &by_cost;
  return plan = work.arrange(costs, std::move(decided), least_items());
}

bool StepLoop::State::any_size(const BatchPlan& batch) const {
  return options.micro_batch == 0 && options.granularity == 1 && !asynchronous && least_items() == 1 &&
         !batch.by_cost() && batch.kind.any_size;
}

std::shared_ptr<balance::SizeSearch> StepLoop::State::search_for(const BatchPlan& batch) {
  if (!options.search_sizes || !any_size(batch)) return nullptr;
  return last_search = of_kind(searches, std::pair(batch.size, batch.kind.speed));
}

std::shared_ptr<internal::ShortPieces> StepLoop::State::shorter_for(const BatchPlan& batch) {
  if (longest_seconds <= 0.0 || !any_size(batch)) return nullptr;
  return of_kind(short_pieces, batch.kind.speed, batch.devices);
}

void StepLoop::State::change_devices(const std::function<void(balance::Balancer&)>& change) {
  look();
  for (internal::Planner* const planner : {&alike, &by_cost}) {
    change(planner->balancer);
    planner->forget();
  }
  plan = nullptr;
}

void StepLoop::State::note(const Step& done) {
  const BatchPlan& ran_by = *done.plan();
  record = done.record();
  internal::Planner& planner = ran_by.by_cost() ? by_cost : alike;
  planner.record(ran_by, record, done.pieces()->ran());
  if (ran_by.by_cost()) work.record(ran_by, record, planner.balancer);
  observe::StepSample sample;
  sample.items = record.items(group.ids());
  sample.costs = ran_by.costs_of(record);
  if (!ran_by.by_cost()) sample.planned = ran_by.shares;
  sample.compute_seconds = record.compute_seconds;
  sample.step_seconds = record.step_seconds;
  sample.moved = ran_by.balance.moved;
  if (sample.moved) sample.reason = ran_by.balance.reason;
  PerDevice<double> busy(group.ids());
  for (const ClaimRecord& claim : record.claims) {
    busy[claim.micro_batch.device] += claim.seconds();
  }
  sample.busy_seconds = busy.values();
  if (!asynchronous) sample.reduction_seconds = record.reduce_seconds;
  sample.launching_seconds = launching_seconds(sample, record, asynchronous);
  metrics.add(sample);
  history.add(sample);
  note_events(ran_by, record);
}

void StepLoop::State::collect(std::size_t most) {
  pending.settle(most, [this](const Step& done) { note(done); });
}

void StepLoop::State::look() {
  pending.look([this](const Step& done) { note(done); });
}

void StepLoop::State::note_events(const BatchPlan& ran_by, const StepRecord& done) {
  const balance::StepPlan& planned = ran_by.balance;
  const double end = std::chrono::duration<double>(std::chrono::steady_clock::now() - origin).count();
  const double start = end - done.step_seconds;
  if (planned.moved) events.push({.kind = observe::EventKind::move, .step = planned.step, .start_seconds = start});
  events.push({.kind = observe::EventKind::step,
               .step = planned.step,
               .end = ran_by.size,
               .start_seconds = start,
               .duration_seconds = done.step_seconds});
  for (const ClaimRecord& claim : done.claims) {
    events.push({.kind = observe::EventKind::micro_batch,
                 .device = claim.micro_batch.device,
                 .step = planned.step,
                 .begin = claim.micro_batch.begin,
                 .end = claim.micro_batch.end,
                 .start_seconds = start + claim.start_seconds,
                 .duration_seconds = claim.finish_seconds - claim.start_seconds});
  }
  events.push({.kind = observe::EventKind::reduction,
               .step = planned.step,
               .start_seconds = end - done.reduce_seconds,
               .duration_seconds = done.reduce_seconds});
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/stepper.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>

#include "engine/health_log.hpp"
#include "engine/item_planner.hpp"
#include "engine/stepper_options.hpp"

namespace paceline {
namespace {

std::vector<std::string> names_of(const DeviceGroup& group) {
  std::vector<std::string> names;
  for (const Device& device : group.devices()) names.push_back(device.name);
  return names;
}

constexpr std::size_t kMostPending = 2;  // steps that the caller may be ahead of the devices

/// A step that was committed, until its times are known.
struct PendingStep {
  std::shared_ptr<const Step> step;
  balance::StepPlan plan;
  std::vector<MicroBatch> pieces;
  std::shared_ptr<const ItemPlan> items;  // null: without costs
};

std::vector<balance::LedgerClaim> ledger_claims(const std::vector<ClaimRecord>& claims) {
  std::vector<balance::LedgerClaim> out;
  out.reserve(claims.size());
  for (const ClaimRecord& claim : claims) {
    const MicroBatch& mb = claim.micro_batch;
    out.push_back({mb.device_index, mb.begin, mb.end, claim.start_seconds, claim.finish_seconds});
  }
  return out;
}

std::vector<balance::LedgerClaim> ledger_claims(const std::vector<MicroBatch>& pieces) {
  std::vector<balance::LedgerClaim> out;
  out.reserve(pieces.size());
  for (const MicroBatch& piece : pieces) out.push_back({piece.device_index, piece.begin, piece.end});
  return out;
}

/// What each device's items cost.
std::vector<double> costs_of(const ItemPlan& plan, const StepRecord& record, std::size_t device_count) {
  std::vector<double> costs(device_count, 0.0);
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    const double* const first = plan.ordered_costs.data();
    costs[mb.device_index] = std::accumulate(first + mb.begin, first + mb.end, costs[mb.device_index]);
  }
  return costs;
}

}  // namespace

struct Stepper::State {
  State(DeviceGroup the_group, StepperOptions the_options)
      : group(std::move(the_group)),
        asynchronous(group.asynchronous()),
        options(engine::with_stable_shapes(std::move(the_options), asynchronous)),
        run_ahead(engine::run_ahead_of(group, options)),
        balancer(engine::make_balancer(group, options, false)),
        metrics(names_of(group)),
        health(group.devices()),
        origin(std::chrono::steady_clock::now()) {}

  /// Calls both kinds' balancers between steps.
  template <class Call>
  void change_devices(const Call& call) {
    collect(0);
    call(balancer);
    if (items) call(items->balancer());
    plan = {};
  }

  void draw_plan(std::int64_t batch_size) {
    latest = current().next_plan(batch_size);
    awaiting_record = true;
  }

  [[nodiscard]] bool corrects() const { return options.corrections.value_or(!asynchronous); }

  [[nodiscard]] std::int64_t least_items() const {
    return options.micro_batch > 0 ? std::min(options.least_items, options.micro_batch) : options.least_items;
  }

  /// Of the kind of steps that was planned last.
  [[nodiscard]] balance::Balancer& current() { return costing ? items->balancer() : balancer; }
  [[nodiscard]] const balance::Balancer& current() const { return costing ? items->balancer() : balancer; }

  /// Before a plan of steps with costs, or without. What is pending belongs to the other kind's balancer.
  void turn_to(bool costs) {
    if (costs == costing) return;
    collect(0);
    if (costs && !items) {
      std::vector<std::string> classes;
      for (const Device& device : group.devices()) classes.push_back(device.device_class);
      items.emplace(engine::make_balancer(group, options, true), classes, options.micro_batch);
      for (std::size_t d = 0; d < group.size(); ++d) {
        if (balancer.retired(d)) items->balancer().retire(d);
      }
    }
    costing = costs;
    plan = {};
  }

  /// Before the first plan: the kind that it is of is the one whose calls the ledger has.
  void attach_ledger() {
    if (ledger && !std::exchange(ledger_attached, true)) current().write_to(ledger);
  }

  /// Whether either kind's balancer was: what a ledger would have from now on lacks that.
  [[nodiscard]] bool called() const noexcept { return balancer.called() || (items && items->balancer().called()); }

  void note(const PendingStep& done) {
    record = done.step->record();
    const std::size_t count = group.size();
    const balance::StepTimings timings = record.timings(count);
    // Steps that ran before an earlier one's times were known may have run by an older plan: a move that came meanwhile
    // is judged by steps that ran by it. The plan stays the same until it is recorded.
    if (!awaiting_record) draw_plan(done.plan.batch_size);
    bool judged = false;
    if (latest.shares == done.plan.shares) {
      if (done.items == nullptr) balancer.record(timings);
      awaiting_record = false;
      judged = true;
    }
    const std::int64_t batch_size = done.items != nullptr ? done.items->size() : done.plan.batch_size;
    if (ledger) {
      const balance::Balancer& decided = done.items != nullptr ? items->balancer() : balancer;
      ledger->claims(done.plan.step, batch_size, ledger_claims(record.claims), ledger_claims(done.pieces),
                     done.items != nullptr ? std::span<const std::int64_t>(done.items->arrangement.order)
                                           : std::span<const std::int64_t>(),
                     decided.writes_ledger());
    }
    if (done.items != nullptr) items->record(*done.items, record, judged);
    observe::StepSample sample;
    sample.items = record.items(count);
    if (done.items != nullptr) sample.costs = costs_of(*done.items, record, count);
    sample.compute_seconds = record.compute_seconds;
    sample.step_seconds = record.step_seconds;
    sample.moved = done.plan.moved;
    for (const auto& runs : timings.devices) {
      double busy = 0.0;
      for (const balance::MicroBatchTiming& run : runs) busy += run.seconds;
      sample.busy_seconds.push_back(busy);
    }
    metrics.add(sample);
    history.add(sample);
    note_events(done.plan, record, batch_size);
  }

  /// Takes note of the oldest steps until at most `most` are left, waiting for them, and of those that are done.
  void collect(std::size_t most) {
    while (!pending.empty()) {
      const PendingStep& oldest = pending.front();
      try {
        if (pending.size() <= most && !oldest.step->settled()) return;
        oldest.step->settle();
      } catch (const Error&) {
        pending.clear();  // a device that has failed shall be reported once
        throw;
      }
      const PendingStep taken = std::move(pending.front());
      pending.pop_front();
      note(taken);
    }
  }

  std::shared_ptr<Step> make(std::shared_ptr<StepProgram> program, StepOptions step_options) {
    auto step = std::make_shared<Step>(group, std::move(program), std::move(step_options));
    {
      const std::lock_guard lock(cancel_mutex);
      cancel_running = step->canceller();
    }
    return step;
  }

  void note_events(const balance::StepPlan& planned, const StepRecord& done, std::int64_t batch_size) {
    const double end = std::chrono::duration<double>(std::chrono::steady_clock::now() - origin).count();
    const double start = end - done.step_seconds;
    if (planned.moved) events.push({.kind = observe::EventKind::move, .step = planned.step, .start_seconds = start});
    events.push({.kind = observe::EventKind::step,
                 .step = planned.step,
                 .end = batch_size,
                 .start_seconds = start,
                 .duration_seconds = done.step_seconds});
    for (const ClaimRecord& claim : done.claims) {
      events.push({.kind = observe::EventKind::micro_batch,
                   .device_index = static_cast<std::int32_t>(claim.micro_batch.device_index),
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

  DeviceGroup group;
  bool asynchronous;  // any of the devices
  StepperOptions options;
  std::vector<std::int64_t> run_ahead;
  balance::Balancer balancer;  // of steps without costs
  std::shared_ptr<balance::LedgerWriter> ledger;
  bool ledger_attached = false;
  std::optional<engine::ItemPlanner> items;
  bool costing = false;
  std::shared_ptr<const ItemPlan> item_plan;  // the last one
  observe::MetricsRecorder metrics;
  observe::History history;
  HealthLog health;
  observe::EventRing events;
  balance::StepPlan plan;    // of the last begin()
  balance::StepPlan latest;  // of the balancer
  bool awaiting_record = false;
  std::deque<PendingStep> pending;
  StepRecord record;
  std::chrono::steady_clock::time_point origin;
  std::mutex cancel_mutex;
  std::function<void()> cancel_running;
};

Stepper::Stepper(DeviceGroup group, StepperOptions options) {
  engine::check(options);
  state_ = std::make_unique<State>(std::move(group), std::move(options));
}

Stepper::~Stepper() = default;

std::shared_ptr<Step> Stepper::begin(std::int64_t batch_size, std::shared_ptr<StepProgram> program,
                                     std::vector<std::vector<MicroBatch>> script) {
  std::shared_ptr<Step> step = prepare(batch_size, std::move(program), std::move(script));
  step->start();
  return step;
}

std::shared_ptr<Step> Stepper::begin(std::shared_ptr<const ItemPlan> items, std::shared_ptr<StepProgram> program) {
  std::shared_ptr<Step> step = prepare(std::move(items), std::move(program));
  step->start();
  return step;
}

std::shared_ptr<Step> Stepper::prepare(std::int64_t batch_size, std::shared_ptr<StepProgram> program,
                                       std::vector<std::vector<MicroBatch>> script) {
  if (batch_size < 1) {
    throw InvalidArgument(fmt::format("step: a batch of {} items; at least one is needed.", batch_size));
  }
  State& state = *state_;
  require_idle();
  state.turn_to(false);
  state.item_plan = nullptr;
  const bool as_before = state.plan.batch_size == batch_size && state.balancer.least_items() == state.least_items();
  state.collect(as_before ? kMostPending - 1 : 0);
  state.attach_ledger();
  state.balancer.set_least_items(state.least_items());
  const std::int64_t before = state.plan.batch_size > 0 ? state.plan.step : -1;
  state.draw_plan(batch_size);
  state.plan = state.latest;
  if (state.plan.step == before) state.plan.moved = false;  // the same plan again, and one move
  StepOptions options;
  options.shares = state.plan.shares;
  options.models = state.plan.models;
  options.noise = state.plan.noise;
  options.micro_batch = state.options.micro_batch;
  options.granularity = state.options.granularity;
  options.least_items = state.least_items();
  options.run_ahead = state.run_ahead;
  // Corrections of any size would be new shapes: asynchronous devices keep to sizes that the user chose.
  const bool taken_over = options.micro_batch > 0 || state.corrects();
  options.stealing = state.options.balance == "auto" && taken_over;
  options.script = std::move(script);
  return state.make(std::move(program), std::move(options));
}

std::shared_ptr<const ItemPlan> Stepper::plan_items(std::span<const double> costs) {
  State& state = *state_;
  require_idle();
  engine::check_costs(costs);  // before anything changes
  state.turn_to(true);
  state.collect(state.plan.batch_size == state.items->batch_units(costs) ? kMostPending - 1 : 0);
  const std::int64_t before = state.plan.batch_size > 0 ? state.plan.step : -1;
  state.attach_ledger();
  state.item_plan = state.items->next(costs, state.least_items());
  state.latest = state.item_plan->balance;
  state.awaiting_record = true;
  state.plan = state.latest;
  if (state.plan.step == before) state.plan.moved = false;  // the same plan again, and one move
  return state.item_plan;
}

std::shared_ptr<Step> Stepper::prepare(std::shared_ptr<const ItemPlan> items, std::shared_ptr<StepProgram> program) {
  State& state = *state_;
  require_idle();
  if (items == nullptr || items != state.item_plan) {
    throw InvalidArgument("step: these items are not what plan_items planned last. Plan, then begin.");
  }
  StepOptions options;
  options.shares = items->item_shares;
  options.stealing = state.options.balance == "auto";
  options.any_size = state.corrects();  // others would be new shapes on asynchronous devices
  options.least_items = state.least_items();
  options.items = std::move(items);
  return state.make(std::move(program), std::move(options));
}

std::optional<ItemReport> Stepper::item_report() const {
  if (!state_->items) return std::nullopt;
  return state_->items->report();
}

void Stepper::set_corrections(std::optional<bool> corrections) {
  StepperOptions options = state_->options;
  options.corrections = corrections;
  engine::check(options);
  state_->options = std::move(options);
}

void Stepper::set_least_items(std::int64_t items) {
  StepperOptions options = state_->options;
  options.least_items = items;
  engine::check(options);
  state_->options = std::move(options);
}

void Stepper::retire(std::size_t device) {
  require_idle();
  state_->change_devices([device](balance::Balancer& balancer) { balancer.retire(device); });
}

void Stepper::restore(std::size_t device) {
  require_idle();
  state_->change_devices([device](balance::Balancer& balancer) { balancer.restore(device); });
}

bool Stepper::retired(std::size_t device) const { return state_->balancer.retired(device); }

void Stepper::cancel() {
  const std::lock_guard lock(state_->cancel_mutex);
  if (state_->cancel_running) state_->cancel_running();
}

void Stepper::require_idle() const {
  if (!state_->group.busy()) return;
  throw InvalidArgument(
      "step: an earlier step of this group has not ended: its workers are still inside user code. Wait for it, or "
      "close the trainer.");
}

void Stepper::commit(std::shared_ptr<const Step> step, std::vector<MicroBatch> pieces) {
  State& state = *state_;
  state.pending.push_back({std::move(step), state.plan, std::move(pieces), state.item_plan});
  state.collect(kMostPending);
}

void Stepper::settle() { state_->collect(0); }
void Stepper::forget_unsettled() noexcept { state_->pending.clear(); }

void Stepper::write_to(std::shared_ptr<balance::LedgerWriter> ledger) {
  State& state = *state_;
  if (ledger != nullptr && state.called()) {
    throw InvalidArgument("a ledger must be attached before the first step, with costs or without");
  }
  state.balancer.write_to(nullptr);
  if (state.items) state.items->balancer().write_to(nullptr);
  state.ledger_attached = false;
  state.ledger = std::move(ledger);
}

bool Stepper::writes_ledger() const noexcept { return state_->ledger != nullptr; }
bool Stepper::has_planned() const noexcept { return state_->called(); }

std::string Stepper::explain() const {
  const balance::Balancer& balancer = state_->current();
  std::string text = balancer.explain(state_->health.causes(balancer.report()));
  if (!state_->costing) return text;
  return "Items are dealt by cost: batch, shares and items below are work, of which the first batch had 1000000.\n" +
         text + state_->items->explain();
}

const balance::StepPlan& Stepper::plan() const noexcept { return state_->plan; }
bool Stepper::by_cost() const noexcept { return state_->costing; }
const StepRecord& Stepper::last_step() const noexcept { return state_->record; }
observe::Metrics Stepper::metrics() const { return state_->metrics.snapshot(); }
const observe::EventRing& Stepper::events() const noexcept { return state_->events; }
const observe::History& Stepper::history() const noexcept { return state_->history; }
balance::Balancer& Stepper::balancer() noexcept { return state_->current(); }
const balance::Balancer& Stepper::balancer() const noexcept { return state_->current(); }
const DeviceGroup& Stepper::group() const noexcept { return state_->group; }

}  // namespace paceline

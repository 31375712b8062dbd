// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/step_loop.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

#include "balance/size_search.hpp"
#include "engine/loop/health_log.hpp"
#include "engine/loop/item_work.hpp"
#include "engine/loop/memory_caps.hpp"
#include "engine/step/step_pieces.hpp"
#include "plural.hpp"

namespace paceline {
namespace {

/// A property of each device of the group.
std::vector<std::string> of_each(const DeviceGroup& group, std::string Device::* property) {
  std::vector<std::string> values;
  for (const Device& device : group.devices()) values.push_back(device.*property);
  return values;
}

constexpr std::size_t kMostPending = 2;   // how many steps the caller may be ahead of the devices
constexpr std::size_t kMostSearches = 8;  // kinds of batches that have a search for sizes

void check(const StepLoopOptions& options) {
  if (options.micro_batch < 0) {
    throw InvalidArgument(
        fmt::format("micro_batch is {}; give a size of at least 1, or 0 to have it planned.", options.micro_batch));
  }
  if (options.least_items < 1) {
    throw InvalidArgument(fmt::format("least_items is {}; a micro-batch has at least one.", options.least_items));
  }
  if (options.corrections == true && (options.micro_batch > 0 || options.balance != Balance::automatic)) {
    throw InvalidArgument(
        "corrections are pieces of planned shares, of sizes that follow the speeds: they need balance 'auto', and a "
        "micro_batch of 0. With a micro-batch of fixed size, devices that are done early take over whole ones anyway.");
  }
}

/// Keeps the sizes of micro-batches the same when shares move, for devices that compile, capture or choose algorithms
/// by size: with a fixed micro-batch, every share is a multiple of it, except for the rest of the batch.
StepLoopOptions with_stable_shapes(StepLoopOptions options, bool asynchronous) {
  if (asynchronous && options.micro_batch > 0 && options.granularity == 1) options.granularity = options.micro_batch;
  return options;
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
  balancer.policy = options.balance;
  balancer.weights = options.weights;
  balancer.granularity = options.granularity;
  for (const Device& device : group.devices()) {
    balance::DeviceProfile& profile = balancer.devices.emplace_back();
    profile.name = device.name;
    profile.device_class = device.device_class;
  }
  return balance::Balancer(std::move(balancer));
}

/// The balancer of one kind of batch, and its part of the ledger.
struct Planner {
  explicit Planner(balance::Balancer made) : balancer(std::move(made)) {}

  balance::StepPlan decide(std::int64_t batch_size, const std::shared_ptr<balance::LedgerWriter>& whole_ledger) {
    if (whole_ledger != nullptr && ledger == nullptr) {
      ledger = std::make_shared<balance::LedgerWriter>(*whole_ledger);
      balancer.write_to(ledger);
    }
    draw(batch_size);
    balance::StepPlan plan = latest;
    if (std::exchange(begun, plan.step) == plan.step) plan.moved = false;  // the same plan again; a move counts once
    return plan;
  }

  void draw(std::int64_t batch_size) {
    latest = balancer.next_plan(batch_size);
    awaits_record = true;
  }

  /// Learns from a committed step that ran by `plan`, in these pieces (see StepPieces::ran).
  void record(const BatchPlan& plan, const StepRecord& record, std::span<const MicroBatch> pieces) {
    // Steps that began before the times of an earlier step were known may have run by an older plan. If a move came in
    // the meantime, only steps that ran by its shares judge it. The balancer's plan stays until one of them is
    // recorded.
    if (!awaits_record) draw(plan.balance.batch_size);
    if (latest.shares == plan.balance.shares) {
      balancer.record(plan.timings(record));
      awaits_record = false;
    }
    if (ledger == nullptr) return;
    std::vector<balance::LedgerClaim> claims;
    for (const ClaimRecord& claim : record.claims) {
      const MicroBatch& mb = claim.micro_batch;
      claims.push_back({mb.device, mb.begin, mb.end, claim.start_seconds, claim.finish_seconds});
    }
    std::vector<balance::LedgerClaim> cut;
    for (const MicroBatch& piece : pieces) cut.push_back({piece.device, piece.begin, piece.end});
    ledger->claims(plan.balance.step, plan.size, claims, cut, plan.arrangement.order);
  }

  /// Earlier plans are void.
  void forget() {
    latest = {};
    begun = -1;
    awaits_record = false;
  }

  balance::Balancer balancer;
  std::shared_ptr<balance::LedgerWriter> ledger;
  balance::StepPlan latest;    // running steps may have an older plan
  bool awaits_record = false;  // no step that ran by `latest` has been recorded yet
  std::int64_t begun = -1;     // the number of the plan that the last batch got
};

}  // namespace

struct StepLoop::State {
  State(DeviceGroup the_group, StepLoopOptions the_options)
      : group(std::move(the_group)),
        asynchronous(group.asynchronous()),
        options(with_stable_shapes(std::move(the_options), asynchronous)),
        run_ahead(run_ahead_of(group, options)),
        alike(make_balancer(group, options, false)),
        by_cost(make_balancer(group, options, true)),
        work(of_each(group, &Device::device_class), options.micro_batch, options.balance != Balance::automatic),
        caps(std::make_shared<internal::MemoryCaps>(group, options.memory_limits)),
        metrics(of_each(group, &Device::name)),
        health(group.devices()),
        origin(std::chrono::steady_clock::now()) {}

  [[nodiscard]] bool corrects() const { return options.corrections.value_or(!asynchronous); }

  [[nodiscard]] std::int64_t least_items() const {
    return options.micro_batch > 0 ? std::min(options.least_items, options.micro_batch) : options.least_items;
  }

  /// The next plan. Waits for the times of earlier steps, except if the plan would be the last one again.
  std::shared_ptr<const BatchPlan> next_plan(std::int64_t batch_size, const BatchKind& kind) {
    const bool again = alike.latest.batch_size == batch_size && alike.balancer.least_items() == least_items();
    collect(again ? kMostPending - 1 : 0);
    alike.balancer.set_least_items(least_items());
    auto made = std::make_shared<BatchPlan>();
    made->size = batch_size;
    made->kind = kind;
    made->balance = alike.decide(batch_size, ledger);
    made->shares = made->balance.shares;
    last = &alike;
    return plan = std::move(made);
  }
  std::shared_ptr<const BatchPlan> next_plan(std::span<const double> costs) {
    collect(by_cost.latest.batch_size == work.batch_units(costs) ? kMostPending - 1 : 0);
    balance::StepPlan decided = by_cost.decide(work.begin(costs), ledger);
    last = &by_cost;
    return plan = work.arrange(costs, std::move(decided), least_items());
  }

  /// The search for sizes that this plan's kind of batch has; null: claims are not cut to find a size.
  std::shared_ptr<balance::SizeSearch> search_for(const BatchPlan& batch) {
    const bool may = options.search_sizes && options.micro_batch == 0 && options.granularity == 1 && !asynchronous &&
                     least_items() == 1 && !batch.by_cost() && batch.kind.any_size;
    if (!may) return nullptr;
    const auto key = std::pair(batch.size, batch.kind.speed);
    const auto known = std::ranges::find(searches, key, [](const auto& one) { return one.first; });
    if (known == searches.end()) {
      if (searches.size() == kMostSearches) searches.erase(searches.begin());
      searches.emplace_back(key, std::make_shared<balance::SizeSearch>());
    } else {
      std::rotate(known, known + 1, searches.end());  // the one that was asked for last is forgotten last
    }
    return last_search = searches.back().second;
  }

  template <class Value>
  void set(Value StepLoopOptions::* option, Value value) {
    StepLoopOptions changed = options;
    changed.*option = value;
    check(changed);
    options = std::move(changed);
  }

  void change_devices(const std::function<void(balance::Balancer&)>& change) {
    collect(0);
    for (Planner* const planner : {&alike, &by_cost}) {
      change(planner->balancer);
      planner->forget();
    }
    plan = nullptr;
  }

  void note(const Step& done) {
    const BatchPlan& ran_by = *done.plan();
    record = done.record();
    Planner& planner = ran_by.by_cost() ? by_cost : alike;
    planner.record(ran_by, record, done.pieces()->ran());
    if (ran_by.by_cost()) work.record(ran_by, record, planner.balancer);
    observe::StepSample sample;
    sample.items = record.items(group.size());
    sample.costs = ran_by.costs_of(record);
    sample.compute_seconds = record.compute_seconds;
    sample.step_seconds = record.step_seconds;
    sample.moved = ran_by.balance.moved;
    sample.busy_seconds.assign(group.size(), 0.0);
    for (const ClaimRecord& claim : record.claims) {
      sample.busy_seconds[claim.micro_batch.device] += claim.finish_seconds - claim.start_seconds;
    }
    metrics.add(sample);
    history.add(sample);
    note_events(ran_by, record);
  }

  /// Notes the oldest steps, waiting for them, until at most `most` are left. Then notes those that are done.
  void collect(std::size_t most) {
    while (!pending.empty()) {
      const Step& oldest = *pending.front();
      try {
        if (pending.size() <= most && !oldest.settled()) return;
        oldest.settle();
      } catch (const Error&) {
        pending.clear();  // so that a failed device is reported only once
        throw;
      }
      const std::shared_ptr<const Step> taken = std::move(pending.front());
      pending.pop_front();
      note(*taken);
    }
  }

  void note_events(const BatchPlan& ran_by, const StepRecord& done) {
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

  DeviceGroup group;
  bool asynchronous;  // any of the devices
  StepLoopOptions options;
  std::vector<std::int64_t> run_ahead;
  // The times of batches with costs and of those without cannot be compared, so each kind has a balancer of its own.
  // Steps of both kinds may alternate.
  Planner alike;
  Planner by_cost;  // splits units of work instead of items
  internal::ItemWork work;
  Planner* last = &alike;                         // the one that made the last plan
  std::shared_ptr<balance::LedgerWriter> ledger;  // of both planners
  std::shared_ptr<const BatchPlan> plan;          // the last one; null where the devices have changed since
  std::shared_ptr<internal::MemoryCaps> caps;
  // By size and speed number of the batch, least recently used first.
  std::vector<std::pair<std::pair<std::int64_t, std::uint64_t>, std::shared_ptr<balance::SizeSearch>>> searches;
  std::shared_ptr<balance::SizeSearch> last_search;
  observe::MetricsRecorder metrics;
  observe::History history;
  HealthLog health;
  observe::EventRing events;
  std::deque<std::shared_ptr<const Step>> pending;  // committed, until their times are known
  StepRecord record;
  std::chrono::steady_clock::time_point origin;
  std::mutex cancel_mutex;
  std::weak_ptr<Step> running;
};

StepLoop::StepLoop(DeviceGroup group, StepLoopOptions options) {
  check(options);
  state_ = std::make_unique<State>(std::move(group), std::move(options));
}

StepLoop::~StepLoop() = default;

std::shared_ptr<const BatchPlan> StepLoop::plan(std::int64_t batch_size, const BatchKind& kind) {
  if (batch_size < 1) {
    throw InvalidArgument(fmt::format("step: a batch of {} items; at least one is needed.", batch_size));
  }
  require_idle();
  return state_->next_plan(batch_size, kind);
}

std::shared_ptr<const BatchPlan> StepLoop::plan(std::span<const double> costs) {
  require_idle();
  internal::check_costs(costs);  // before anything changes
  return state_->next_plan(costs);
}

std::shared_ptr<Step> StepLoop::begin(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<StepProgram> program) {
  std::shared_ptr<Step> step = prepare(std::move(plan), std::move(program));
  step->start();
  return step;
}

std::shared_ptr<Step> StepLoop::prepare(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<StepProgram> program,
                                        StepScript script) {
  State& state = *state_;
  require_idle();
  if (plan == nullptr || plan != state.plan) {
    throw InvalidArgument("step: this plan is not the last one that was made. Plan, then begin.");
  }
  internal::check_pieces(script);
  StepOptions options;
  options.shares = plan->shares;
  options.models = plan->balance.models;
  options.noise = plan->balance.noise;
  options.micro_batch = state.options.micro_batch;
  options.granularity = state.options.granularity;
  options.least_items = state.least_items();
  options.run_ahead = state.run_ahead;
  // Corrections of any size would be new sizes. Asynchronous devices keep to sizes that the user chose or that are
  // planned.
  options.any_size = state.corrects();
  const bool in_pieces = plan->by_cost() || options.micro_batch > 0;
  options.stealing = state.options.balance == Balance::automatic && (in_pieces || options.any_size);
  options.pieces = std::make_shared<internal::StepPieces>(plan, state.caps,
                                                          script.claims.empty() ? state.search_for(*plan) : nullptr,
                                                          options.least_items, std::move(script.pieces));
  options.script = std::move(script.claims);
  options.plan = std::move(plan);
  auto step = std::make_shared<Step>(state.group, std::move(program), std::move(options));
  const std::lock_guard lock(state.cancel_mutex);
  state.running = step;
  return step;
}

bool StepLoop::shrink(const Step& failed, bool limited) {
  const StepFailure* const failure = failed.failure();
  if (failed.plan() == nullptr) throw InvalidArgument("step: shrink() is for steps that a StepLoop has prepared.");
  if (failure == nullptr || !failure->micro_batch) return false;
  if (failed.pieces()->scripted()) return false;  // smaller pieces would be another run
  const MicroBatch& micro_batch = *failure->micro_batch;
  return state_->caps->shrink(micro_batch.device, *failed.plan(), micro_batch.begin, micro_batch.end,
                              state_->least_items(), limited);
}

std::vector<MemoryReport> StepLoop::memory_report() const { return state_->caps->report(); }

std::optional<ItemReport> StepLoop::item_report() const {
  if (!state_->by_cost.balancer.called()) return std::nullopt;
  return state_->work.report();
}

void StepLoop::set_corrections(std::optional<bool> corrections) {
  state_->set(&StepLoopOptions::corrections, corrections);
}

void StepLoop::set_least_items(std::int64_t items) { state_->set(&StepLoopOptions::least_items, items); }

void StepLoop::retire(DeviceId device) {
  require_idle();
  state_->change_devices([device](balance::Balancer& balancer) { balancer.retire(device); });
  state_->metrics.set_retired(device, true);
}

void StepLoop::restore(DeviceId device) {
  require_idle();
  state_->change_devices([device](balance::Balancer& balancer) { balancer.restore(device); });
  state_->metrics.set_retired(device, false);
}

bool StepLoop::retired(DeviceId device) const { return balancer().retired(device); }

std::vector<std::optional<plan::CostModel>> StepLoop::speeds(bool by_cost) const {
  std::vector<std::optional<plan::CostModel>> models;
  for (const balance::DeviceReport& device : (by_cost ? state_->by_cost : state_->alike).balancer.report().devices) {
    models.emplace_back();
    if (device.measured) models.back() = plan::CostModel::affine(device.fixed_seconds, device.per_item_seconds);
  }
  return models;
}

void StepLoop::hint(const std::vector<std::optional<plan::CostModel>>& models, bool by_cost) {
  require_idle();
  state_->collect(0);
  Planner& planner = by_cost ? state_->by_cost : state_->alike;
  planner.balancer.hint(models);
  planner.forget();
  state_->plan = nullptr;
}

void StepLoop::cancel() {
  const std::lock_guard lock(state_->cancel_mutex);
  if (const std::shared_ptr<Step> step = state_->running.lock()) step->cancel();
}

void StepLoop::require_idle() const {
  if (!state_->group.busy()) return;
  throw InvalidArgument(
      "step: an earlier step of this group has not ended: its workers are still inside user code. Wait for it, or "
      "close the trainer.");
}

void StepLoop::commit(std::shared_ptr<const Step> step) {
  if (step == nullptr || step->plan() == nullptr) {
    throw InvalidArgument("step: commit() is for steps that a StepLoop has prepared.");
  }
  step->pieces()->commit();
  state_->pending.push_back(std::move(step));
  state_->collect(kMostPending);
}

void StepLoop::settle() { state_->collect(0); }
void StepLoop::forget_unsettled() noexcept { state_->pending.clear(); }

void StepLoop::write_to(std::shared_ptr<balance::LedgerWriter> ledger) {
  if (ledger != nullptr && has_planned()) {
    throw InvalidArgument("a ledger must be attached before the first step, with costs or without");
  }
  state_->ledger = std::move(ledger);
  for (Planner* const planner : {&state_->alike, &state_->by_cost}) {
    planner->balancer.write_to(nullptr);
    planner->ledger = nullptr;
  }
}

bool StepLoop::writes_ledger() const noexcept { return state_->ledger != nullptr; }
bool StepLoop::has_planned() const noexcept {
  return state_->alike.balancer.called() || state_->by_cost.balancer.called();
}

std::string StepLoop::explain() const {
  std::string text = balancer().explain(state_->health.causes(balancer().report()));
  if (by_cost()) {
    text = "Items are dealt by cost: batch, shares and items below are work, of which the first batch had 1000000.\n" +
           text + state_->work.explain();
  }
  text += state_->caps->explain();
  const balance::SizeSearch* const search = state_->last_search.get();
  if (search != nullptr && search->size()) {
    text += fmt::format(
        "Micro-batches of about {}: measured to be {:.2f} times as fast as the size before that. micro_batch= sets "
        "it.\n",
        plural(*search->size(), "item"), search->gain());
  }
  return text;
}

const balance::StepPlan& StepLoop::last_plan() const noexcept {
  static const balance::StepPlan none;
  return state_->plan != nullptr ? state_->plan->balance : none;
}
bool StepLoop::by_cost() const noexcept { return state_->last == &state_->by_cost; }
const StepRecord& StepLoop::last_step() const noexcept { return state_->record; }
observe::Metrics StepLoop::metrics() const { return state_->metrics.snapshot(); }
const observe::EventRing& StepLoop::events() const noexcept { return state_->events; }
const observe::History& StepLoop::history() const noexcept { return state_->history; }
balance::Balancer& StepLoop::balancer() noexcept { return state_->last->balancer; }
const balance::Balancer& StepLoop::balancer() const noexcept { return state_->last->balancer; }
const DeviceGroup& StepLoop::group() const noexcept { return state_->group; }

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/step_loop.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>

#include "balance/size_search.hpp"
#include "engine/loop/health_log.hpp"
#include "engine/loop/memory_caps.hpp"
#include "engine/loop/planner.hpp"
#include "engine/loop/step_loop_options.hpp"
#include "engine/step/step_pieces.hpp"
#include "plural.hpp"

namespace paceline {
namespace {

std::vector<std::string> names_of(const DeviceGroup& group) {
  std::vector<std::string> names;
  for (const Device& device : group.devices()) names.push_back(device.name);
  return names;
}

constexpr std::size_t kMostPending = 2;   // how many steps the caller may be ahead of the devices
constexpr std::size_t kMostSearches = 8;  // kinds of batches that have a search for sizes

// Each device's claims must be cut into its pieces without a gap, because an item outside of all pieces would not run.
void check_pieces(const StepScript& script) {
  if (script.pieces.empty()) return;
  if (script.pieces.size() != script.claims.size()) {
    throw InvalidArgument(
        fmt::format("step: pieces for {} with claims for {}; give both, one list of each for each device.",
                    plural(script.pieces.size(), "device"), script.claims.size()));
  }
  for (std::size_t d = 0; d < script.pieces.size(); ++d) {
    auto piece = script.pieces[d].begin();
    const auto last = script.pieces[d].end();
    for (const MicroBatch& claim : script.claims[d]) {
      std::int64_t covered = claim.begin;
      for (; covered < claim.end && piece != last && piece->begin == covered && piece->end > covered; ++piece) {
        covered = piece->end;
      }
      if (covered == claim.end) continue;
      throw InvalidArgument(
          fmt::format("step: the pieces of device {} do not make up its claim [{}, {}) from item {} on; they must "
                      "follow one another and end where it ends.",
                      d, claim.begin, claim.end, covered));
    }
    if (piece != last) {
      throw InvalidArgument(
          fmt::format("step: the piece [{}, {}) of device {} is beyond its claims.", piece->begin, piece->end, d));
    }
  }
}

}  // namespace

struct StepLoop::State {
  State(DeviceGroup the_group, StepLoopOptions the_options)
      : group(std::move(the_group)),
        asynchronous(group.asynchronous()),
        options(internal::with_stable_shapes(std::move(the_options), asynchronous)),
        run_ahead(internal::run_ahead_of(group, options)),
        planner(group, options),
        caps(std::make_shared<internal::MemoryCaps>(group, options.memory_limits)),
        metrics(names_of(group)),
        health(group.devices()),
        origin(std::chrono::steady_clock::now()) {}

  [[nodiscard]] bool corrects() const { return options.corrections.value_or(!asynchronous); }

  [[nodiscard]] std::int64_t least_items() const {
    return options.micro_batch > 0 ? std::min(options.least_items, options.micro_batch) : options.least_items;
  }

  template <class Batch>
  std::shared_ptr<const BatchPlan> next_plan(const Batch& batch, const BatchKind& kind, bool plans_again) {
    collect(plans_again ? kMostPending - 1 : 0);
    const std::shared_ptr<BatchPlan> made = planner.next(batch, least_items());
    made->kind = kind;
    plan = made;
    return plan;
  }

  /// The search for sizes that this plan's kind of batch has; null: claims are not cut to find a size.
  std::shared_ptr<balance::SizeSearch> search_for(const BatchPlan& batch) {
    const bool may = options.search_sizes && options.micro_batch == 0 && options.granularity == 1 && !asynchronous &&
                     least_items() == 1 && !batch.by_cost() && batch.kind.any_size;
    if (!may) return nullptr;
    const auto key = std::pair(batch.size, batch.kind.speed);
    const auto known =
        std::find_if(searches.begin(), searches.end(), [&](const auto& one) { return one.first == key; });
    if (known == searches.end()) {
      if (searches.size() == kMostSearches) searches.erase(searches.begin());
      searches.emplace_back(key, std::make_shared<balance::SizeSearch>());
    } else {
      std::rotate(known, known + 1, searches.end());  // the one that was asked for last is forgotten last
    }
    return last_search = searches.back().second;
  }

  void change_devices(const std::function<void(balance::Balancer&)>& change) {
    collect(0);
    planner.change_devices(change);
    plan = nullptr;
  }

  void note(const Step& done) {
    const BatchPlan& ran_by = *done.plan();
    record = done.record();
    planner.record(ran_by, record, done.pieces() != nullptr ? done.pieces()->ran() : std::vector<MicroBatch>());
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
  internal::Planner planner;
  std::shared_ptr<const BatchPlan> plan;  // the last one; null where the devices have changed since
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
  std::function<void()> cancel_running;
};

StepLoop::StepLoop(DeviceGroup group, StepLoopOptions options) {
  internal::check(options);
  state_ = std::make_unique<State>(std::move(group), std::move(options));
}

StepLoop::~StepLoop() = default;

std::shared_ptr<const BatchPlan> StepLoop::plan(std::int64_t batch_size, const BatchKind& kind) {
  if (batch_size < 1) {
    throw InvalidArgument(fmt::format("step: a batch of {} items; at least one is needed.", batch_size));
  }
  require_idle();
  return state_->next_plan(batch_size, kind, state_->planner.plans_again(batch_size, state_->least_items()));
}

std::shared_ptr<const BatchPlan> StepLoop::plan(std::span<const double> costs) {
  require_idle();
  internal::check_costs(costs);  // before anything changes
  return state_->next_plan(costs, {}, state_->planner.plans_again(costs));
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
  check_pieces(script);
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
  const std::shared_ptr<balance::SizeSearch> search = script.claims.empty() ? state.search_for(*plan) : nullptr;
  if (search != nullptr || !script.pieces.empty() || !state.caps->idle()) {
    options.pieces =
        std::make_shared<internal::StepPieces>(plan, state.caps, search, options.least_items, std::move(script.pieces));
  }
  options.script = std::move(script.claims);
  options.plan = std::move(plan);
  auto step = std::make_shared<Step>(state.group, std::move(program), std::move(options));
  const std::lock_guard lock(state.cancel_mutex);
  state.cancel_running = step->canceller();
  return step;
}

bool StepLoop::shrink(const Step& failed, bool limited) {
  const StepFailure* const failure = failed.failure();
  if (failed.plan() == nullptr) throw InvalidArgument("step: shrink() is for steps that a StepLoop has prepared.");
  if (failure == nullptr || !failure->micro_batch) return false;
  if (failed.pieces() != nullptr && failed.pieces()->scripted()) return false;  // smaller pieces would be another run
  const MicroBatch& micro_batch = *failure->micro_batch;
  return state_->caps->shrink(micro_batch.device, *failed.plan(), micro_batch.begin, micro_batch.end,
                              state_->least_items(), limited);
}

std::vector<MemoryReport> StepLoop::memory_report() const { return state_->caps->report(); }

std::optional<ItemReport> StepLoop::item_report() const { return state_->planner.item_report(); }

void StepLoop::set_corrections(std::optional<bool> corrections) {
  StepLoopOptions options = state_->options;
  options.corrections = corrections;
  internal::check(options);
  state_->options = std::move(options);
}

void StepLoop::set_least_items(std::int64_t items) {
  StepLoopOptions options = state_->options;
  options.least_items = items;
  internal::check(options);
  state_->options = std::move(options);
}

void StepLoop::retire(DeviceId device) {
  require_idle();
  state_->change_devices([device](balance::Balancer& balancer) { balancer.retire(device); });
}

void StepLoop::restore(DeviceId device) {
  require_idle();
  state_->change_devices([device](balance::Balancer& balancer) { balancer.restore(device); });
}

bool StepLoop::retired(DeviceId device) const { return state_->planner.balancer().retired(device); }

void StepLoop::cancel() {
  const std::lock_guard lock(state_->cancel_mutex);
  if (state_->cancel_running) state_->cancel_running();
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
  if (step->pieces() != nullptr) step->pieces()->commit();
  state_->pending.push_back(std::move(step));
  state_->collect(kMostPending);
}

void StepLoop::settle() { state_->collect(0); }
void StepLoop::forget_unsettled() noexcept { state_->pending.clear(); }

void StepLoop::write_to(std::shared_ptr<balance::LedgerWriter> ledger) {
  if (ledger != nullptr && has_planned()) {
    throw InvalidArgument("a ledger must be attached before the first step, with costs or without");
  }
  state_->planner.write_to(std::move(ledger));
}

bool StepLoop::writes_ledger() const noexcept { return state_->planner.writes_ledger(); }
bool StepLoop::has_planned() const noexcept { return state_->planner.has_planned(); }

std::string StepLoop::explain() const {
  std::string text = state_->planner.explain(state_->health.causes(balancer().report())) + state_->caps->explain();
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
bool StepLoop::by_cost() const noexcept { return state_->planner.by_cost(); }
const StepRecord& StepLoop::last_step() const noexcept { return state_->record; }
observe::Metrics StepLoop::metrics() const { return state_->metrics.snapshot(); }
const observe::EventRing& StepLoop::events() const noexcept { return state_->events; }
const observe::History& StepLoop::history() const noexcept { return state_->history; }
balance::Balancer& StepLoop::balancer() noexcept { return state_->planner.balancer(); }
const balance::Balancer& StepLoop::balancer() const noexcept { return state_->planner.balancer(); }
const DeviceGroup& StepLoop::group() const noexcept { return state_->group; }

}  // namespace paceline

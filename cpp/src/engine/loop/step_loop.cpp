// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/step_loop.hpp>

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include <paceline/error.hpp>

#include "engine/loop/step_loop_state.hpp"
#include "engine/step/step_pieces.hpp"
#include "plural.hpp"

namespace paceline {
namespace {

/// Each device's claims must be cut into its pieces without a gap, because an item outside of all pieces would not run.
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

StepLoop::StepLoop(const DeviceGroup& group, StepLoopOptions options) {
  State::check(options);
  state_ = std::make_unique<State>(group, std::move(options));
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
  check_pieces(script);
  StepOptions options;
  options.shares = plan->shares;
  options.models = plan->balance.models;
  options.noise = plan->balance.noise;
  options.micro_batch = state.options.micro_batch;
  options.granularity = plan->balance.granularity;
  options.least_items = state.least_items();
  options.run_ahead = state.run_ahead;
  // Corrections of any size would be new sizes. Asynchronous devices keep to sizes that the user chose or that are
  // planned.
  options.any_size = state.corrects();
  const bool in_pieces = plan->by_cost() || options.micro_batch > 0;
  options.stealing = state.options.balance == Balance::automatic && (in_pieces ? state.helps() : options.any_size);
  options.pieces = std::make_shared<internal::StepPieces>(plan, state.caps,
                                                          script.claims.empty() ? state.search_for(*plan) : nullptr,
                                                          options.least_items, std::move(script.pieces));
  if (script.claims.empty()) options.pieces->shorten(state.shorter_for(*plan), state.longest_seconds);
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

void StepLoop::set_longest(double seconds) {
  if (!(seconds >= 0.0 && std::isfinite(seconds))) {
    throw InvalidArgument(fmt::format("longest micro-batch: {} seconds; give more than 0, or 0 for any.", seconds));
  }
  state_->longest_seconds = seconds;
}

void StepLoop::retire(DeviceId device) {
  require_idle();
  const std::size_t place = group().place(device);
  state_->change_devices([place](balance::Balancer& balancer) { balancer.retire(place); });
  state_->metrics.set_retired(place, true);
}

void StepLoop::restore(DeviceId device) {
  require_idle();
  const std::size_t place = group().place(device);
  state_->change_devices([place](balance::Balancer& balancer) { balancer.restore(place); });
  state_->metrics.set_retired(place, false);
}

bool StepLoop::retired(DeviceId device) const { return balancer().retired(group().place(device)); }

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
  state_->look();
  internal::Planner& planner = by_cost ? state_->by_cost : state_->alike;
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
      "step: an earlier step of this loop has not ended: its workers are still inside user code. Wait for it, or "
      "close the trainer.");
}

void StepLoop::commit(std::shared_ptr<const Step> step) {
  if (step == nullptr || step->plan() == nullptr) {
    throw InvalidArgument("step: commit() is for steps that a StepLoop has prepared.");
  }
  step->pieces()->commit();
  state_->pending.add(std::move(step));
  state_->collect(State::kMostPending);
}

void StepLoop::settle() { state_->look(); }
void StepLoop::forget_unsettled() noexcept { state_->pending.forget(); }
std::int64_t StepLoop::committed() const {
  return state_->pending.count([this] { return state_->history.steps(); });
}

void StepLoop::write_to(std::shared_ptr<balance::LedgerWriter> ledger) {
  if (ledger != nullptr && has_planned()) {
    throw InvalidArgument("a ledger must be attached before the first step, with costs or without");
  }
  state_->ledger = std::move(ledger);
  for (internal::Planner* const planner : {&state_->alike, &state_->by_cost}) {
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
    text = "Items are dealt by cost. The first batch had 1000000 units of work.\n" + text + state_->work.explain();
  }
  text += state_->caps->explain();
  const balance::SizeSearch* const search = state_->last_search.get();
  if (search != nullptr && search->size()) {
    text += fmt::format(
        "Micro-batches of about {}: measured to be {:.2f} times as fast as the size before that. micro_batch= sets "
        "it.\n",
        plural(*search->size(), "item"), search->gain());
  }
  if (state_->longest_seconds > 0.0 && !state_->short_pieces.empty()) {
    std::string sizes;
    for (const DeviceId id : group().ids()) {
      const std::int64_t size = state_->short_pieces.back().second->size(id);
      if (size > 0) {
        sizes += fmt::format("{}{} on {}", sizes.empty() ? "" : ", ", plural(size, "item"), group().device(id).name);
      }
    }
    if (!sizes.empty()) {
      text +=
          fmt::format("Micro-batches of at most {}, to end within {:.0f} ms.\n", sizes, 1e3 * state_->longest_seconds);
    }
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

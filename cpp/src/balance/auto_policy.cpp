// SPDX-License-Identifier: Apache-2.0
#include "balance/auto_policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "balance/bounded.hpp"

namespace paceline::balance {
namespace {

constexpr double kWrongHint = 0.1;              // of a step's time; noise promises less
constexpr std::size_t kLeastStepsMeasured = 2;  // one step alone may be a spike
constexpr std::size_t kSettledSamples = 48;     // a standard error of 0.5 % at 3 % noise: half of what the gate asks
constexpr std::size_t kProvisionalKept = 32;    // batch sizes; sequences with lengths have many
constexpr std::size_t kRentsKept = 64;          // batch sizes: as many as have shares in force
constexpr double kPromiseKept = 0.5;            // of what a move must promise; below, it is another move
constexpr std::int64_t kFirmSteps = 32;
constexpr std::int64_t kMostFirmSteps = 2048;

/// The fewest samples of a device that has work. A device that always came too late has none; its starts count instead.
/// After a change point one sample is enough: the estimator has believed it.
std::size_t fewest_samples(const PolicyContext& context, const std::vector<std::int64_t>& present) {
  std::size_t fewest = kSettledSamples;
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i] == 0 || context.limits[i].maximum == 0) continue;
    const DeviceEstimate& estimate = context.estimator.devices()[i];
    const bool changed = estimate.samples > 0 && estimate.change_points > 0;
    const std::size_t timed = changed ? std::max(estimate.samples, kLeastStepsMeasured) : estimate.samples;
    fewest = std::min(fewest, timed > 0 ? timed : context.startup.samples(i));
  }
  return fewest;
}

/// Whether every device ran at least half of its share. If other devices took over more, the step's time does not tell
/// what the shares in force are worth.
bool ran_as_planned(const std::vector<std::int64_t>& shares, const StepTimings& timings) {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    std::int64_t ran = 0;
    for (const MicroBatchTiming& timing : timings.devices[i]) ran += timing.items;
    if (ran < shares[i] - ran) return false;
  }
  return true;
}

}  // namespace

AutoPolicy::Decision AutoPolicy::decide(const PolicyContext& context, const std::vector<std::int64_t>& present,
                                        bool settled, double least_gain) {
  const std::vector<plan::CostModel> models = estimated_models(context);
  std::vector<std::int64_t> target = best_split(context, models, !settled);
  const Promise promise = promise_of(context, models, present, target, least_gain);
  return {promise, std::move(target)};
}

/// Seconds that the first step with these shares takes longer than later ones.
double AutoPolicy::cost_of(const PolicyContext& context, const std::vector<std::int64_t>& shares) {
  if (!context.sizes.is_new(shares)) return 0.0;
  const std::vector<plan::CostModel> models = estimated_models(context);
  return context.sizes.first_run_seconds([&](const auto& those) { return makespan(context, models, those); });
}

/// Forgets the rent of a move whose target no longer gains enough. The target follows the estimates, so it changes a
/// little with each step and is still the same move.
void AutoPolicy::forget_broken_promise(const PolicyContext& context, const std::vector<std::int64_t>& present,
                                       double required) {
  const auto rent = rents_.find(context.batch_size);
  if (rent == rents_.end()) return;
  const std::vector<plan::CostModel> models = estimated_models(context);
  const double now = makespan(context, models, present);
  const double then = makespan(context, models, rent->second.target);
  if (now - then < kPromiseKept * required * now) rents_.erase(rent);
}

/// Seconds lost at this batch size by waiting with the move, this step's included.
double AutoPolicy::lost_with(const PolicyContext& context, const Decision& decision) {
  make_room(rents_, context.batch_size, kRentsKept, [](const Rent& rent) { return rent.step; });
  Rent& rent = rents_[context.batch_size];
  if (rent.step != context.step) rent.seconds += decision.saved_seconds;
  rent.step = context.step;
  rent.target = decision.target;
  return rent.seconds;
}

Proposal AutoPolicy::gate(const PolicyContext& context, const std::vector<std::int64_t>& present) {
  if (context.step < firm_until_step_) {
    return {present, fmt::format("kept: a move was taken back, none before step {}", firm_until_step_)};
  }
  const std::size_t samples = fewest_samples(context, present);
  if (samples < kLeastStepsMeasured) return {present, "kept: too few steps measured at the present speeds"};
  const bool completes = samples >= kSettledSamples && provisional_.contains(context.batch_size);
  const Decision decision = decide(context, present, samples >= kSettledSamples, completes ? 0.0 : kLeastGain);
  last_required_ = decision.required;
  forget_broken_promise(context, present, decision.required);
  const double gain = 100.0 * std::max(decision.gain, 0.0);
  const double required = 100.0 * decision.required;
  if (decision.gain <= decision.required || decision.target == present) {
    if (completes) provisional_.erase(context.batch_size);
    if (auto shares = explorer_.grow(context, present)) {
      return {*std::move(shares), "probe: sizes on the way to a split that may be better, to see whether it is",
              present};
    }
    return {present, fmt::format("kept: a move promises {:.2f} %, it must promise more than {:.2f} %", gain, required)};
  }
  if (const double cost = cost_of(context, decision.target); cost > 0.0) {
    if (const double lost = lost_with(context, decision); lost < cost) {
      return {present, fmt::format("kept: a move promises {:.2f} %, but first runs of its sizes take {:.3g} s, of "
                                   "which {:.3g} s are lost so far",
                                   gain, cost, lost)};
    }
  }
  rents_.erase(context.batch_size);
  if (completes) provisional_.erase(context.batch_size);
  if (samples < kSettledSamples) {
    make_room(provisional_, context.batch_size, kProvisionalKept, [](std::int64_t step) { return step; });
    provisional_[context.batch_size] = context.step;
  }
  judge_.started(context.step, context.batch_size, present, decision.target, decision.gain);
  return {decision.target, fmt::format("{}: promises {:.2f} %, more than the {:.2f} % it must",
                                       completes ? "completed the last move" : "moved", gain, required)};
}

Proposal AutoPolicy::propose(const PolicyContext& context) {
  explorer_.begin();
  if (take_back_ && take_back_->batch_size == context.batch_size) {
    const MoveJudge::Verdict verdict = *std::exchange(take_back_, std::nullopt);
    provisional_.erase(context.batch_size);
    rents_.erase(context.batch_size);
    return {verdict.restore,
            fmt::format("the last move made steps {:.1f} % longer and is taken back", 100.0 * verdict.loss)};
  }
  const auto even = [&] { return split_by_weights(context, std::vector<double>(context.limits.size(), 1.0)); };
  const bool first = context.incumbent == nullptr;
  // Hints say what calibration would find out, and calibration overloads slow devices. But wrong hints may give sizes
  // so unequal that no gain can be told from the error of the shape. Then the balancer begins as without hints.
  const auto hints_are_wrong = [&] {
    return !first && context.estimator.has_evidence() &&
           fewest_samples(context, *context.incumbent) >= kLeastStepsMeasured &&
           decide(context, *context.incumbent, true, kLeastGain).gain > kWrongHint;
  };
  if (!explorer_.calibrated() && (context.hints == nullptr || hints_are_wrong())) {
    if (auto shares = explorer_.calibrate(context, even())) {
      return {*std::move(shares), "calibration: sizes off the even split tell fixed from per-item time", even()};
    }
  }
  if (!context.estimator.has_evidence()) {
    if (context.hints == nullptr) return {first ? even() : *context.incumbent, "even: nothing measured yet"};
    return {first ? best_split(context, *context.hints, false) : *context.incumbent,
            "by the speeds of an earlier run: nothing measured yet"};
  }
  const std::vector<std::int64_t> present =
      first ? best_split(context, estimated_models(context), false) : *context.incumbent;
  if (auto shares = explorer_.probe(context, present)) {
    return {*std::move(shares), "probe: a device without work gets a little, to see whether it recovered", present};
  }
  if (first) return {present, "first step of this batch size: the best split by the measured speeds"};
  return gate(context, present);
}

void AutoPolicy::observe(const PolicyContext& context, const StepTimings& timings, double makespan_seconds) {
  const std::int64_t change_points = context.estimator.change_points();
  const bool changed = change_points != std::exchange(seen_change_points_, change_points);
  if (changed) {
    firm_steps_ = firm_until_step_ = 0;
    take_back_.reset();  // its shares were better at speeds that are gone
  }
  explorer_.observe(context, timings);
  if (explorer_.explores()) return;  // a step off the split says nothing about the split
  // With other work in some steps and not in others, their times do not tell what a move is worth either.
  const bool as_planned = ran_as_planned(*context.incumbent, timings) && !context.lent.lends();
  if (!as_planned) judge_.skip(context.batch_size);
  const bool comparable = as_planned && !context.estimator.unsettled();
  auto verdict = judge_.observe(context.batch_size, comparable ? makespan_seconds : 0.0, changed,
                                context.estimator.pooled_noise());
  if (verdict) {
    take_back_ = std::move(verdict);
    firm_steps_ = std::clamp(2 * firm_steps_, kFirmSteps, kMostFirmSteps);
    firm_until_step_ = context.step + firm_steps_;
  }
}

void AutoPolicy::reset() {
  judge_.reset_all();
  take_back_.reset();
  provisional_.clear();
  rents_.clear();
  firm_steps_ = firm_until_step_ = 0;
}

void AutoPolicy::describe(BalanceReport& report) const {
  report.taken_back = judge_.taken_back();
  report.required_gain = last_required_;
  report.firm_until_step = firm_until_step_;
  report.recent_moves = judge_.moves();
}

}  // namespace paceline::balance

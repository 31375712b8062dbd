// SPDX-License-Identifier: Apache-2.0
#include "balance/probe.hpp"

#include <algorithm>

#include "balance/target.hpp"
#include "plan/numbers.hpp"

namespace paceline::balance {
namespace {

constexpr std::int64_t kFirstWait = 100;
constexpr std::int64_t kFirstWaitOfLate = 8;  // costs nothing: if the device is late again, others run its part
constexpr std::int64_t kLongestWait = 1600;
constexpr int kQuickProbes = 4;
constexpr double kLittleKnown = 0.04;  // a relative error; a larger one can hide a device that is worth taking back
constexpr double kCheap = 0.02;        // of one step: the most that a quick probe may cost
constexpr double kFirstBudget = 0.02;  // of the time since the device lost its work: the most for the first probe
constexpr double kBudget = 0.005;      // of all time: the most for probes in the long run
constexpr double kWorthwhile = 0.01;   // what a move must promise
constexpr double kLongestWaitOfAll = 1e6;

/// Whether the device starts later than the options say.
bool late(const PolicyContext& context, std::size_t i) { return context.startup.seconds(i) > context.startup.given(i); }

}  // namespace

/// The limits if device `i` started as the options say.
std::vector<plan::ShareLimits> Probe::in_time(const PolicyContext& context, std::size_t i) {
  std::vector<plan::ShareLimits> limits(context.limits.begin(), context.limits.end());
  limits[i].startup_seconds = context.startup.given(i);
  return limits;
}

/// The number of items that device `i` can run before the others finish, by the estimates; at least its minimum.
std::int64_t Probe::size(const PolicyContext& context, const plan::CostModel& model, std::size_t i,
                         double others_seconds) {
  const std::int64_t grain = context.granularity;
  const plan::ShareLimits& limits = context.limits[i];
  const std::int64_t least = plan::rounded_up(std::max(limits.minimum, grain), grain);
  const std::int64_t most = std::min(limits.maximum, context.batch_size);
  const std::int64_t fits = model.items_within(others_seconds - limits.startup_seconds, most);
  return std::max(least, fits / grain * grain);
}

std::optional<std::vector<std::int64_t>> Probe::shares(const PolicyContext& context,
                                                       const std::vector<std::int64_t>& present) {
  std::vector<std::size_t> idle;
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i] > 0 || context.limits[i].maximum == 0) {
      idle_.erase(i);
      continue;
    }
    const std::int64_t wait = late(context, i) ? kFirstWaitOfLate : kFirstWait;
    idle_.try_emplace(i, Idle{context.step, context.step + wait, wait, kLongestWait, 0});
    idle.push_back(i);
  }
  if (idle.empty()) return std::nullopt;
  const std::vector<plan::CostModel> models = estimated_models(context);
  const double now = makespan(context, models, present);
  double others = 0.0;
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i] > 0) others = std::max(others, models[i].seconds(present[i]));
  }
  std::vector<std::int64_t> shares = present;
  for (const std::size_t i : idle) {
    Idle& entry = idle_.at(i);
    const std::int64_t wanted = size(context, models[i], i, others);
    const bool quick =
        entry.quick < kQuickProbes && context.estimator.error_at(i, static_cast<double>(wanted)) > kLittleKnown;
    if (!quick && context.step < entry.due_step) continue;  // the common case, decided without a split
    std::vector<std::int64_t> with = shares;
    if (!take(context, with, i, wanted)) continue;
    // A device whose fixed time alone is estimated to take many steps is probed rarely.
    const std::vector<plan::ShareLimits> limits = in_time(context, i);
    PolicyContext punctual = context;
    punctual.limits = limits;
    const double excess = now > 0.0 ? makespan(punctual, models, with) / now - 1.0 : 0.0;
    const double waited = static_cast<double>(context.step - entry.since_step);
    const bool due =
        context.step >= entry.due_step && waited * kFirstBudget >= excess * static_cast<double>(idle.size());
    if (!due && !(quick && excess <= kCheap)) continue;
    if (due && !could_pay(context, models, present, i)) {
      entry.due_step = context.step + kFirstWait;
      continue;
    }
    entry.longest_wait =
        std::max<std::int64_t>(kLongestWait, static_cast<std::int64_t>(std::min(excess / kBudget, kLongestWaitOfAll)));
    entry.quick += due ? 0 : 1;
    shares = std::move(with);
  }
  if (shares == present) return std::nullopt;
  asked_step_ = context.step;
  asked_.clear();
  for (const std::size_t i : idle) {
    if (shares[i] > 0) asked_.push_back(i);
  }
  return shares;
}

/// Whether the split would gain if device `i` started in time and were as fast as the fastest working device of its
/// class, or of any class if no other device of its class works. A device that is left out because of reductions or a
/// small batch would stay out at any speed.
bool Probe::could_pay(const PolicyContext& context, const std::vector<plan::CostModel>& models,
                      const std::vector<std::int64_t>& present, std::size_t i) {
  const Estimator& estimator = context.estimator;
  const std::int64_t items = std::max<std::int64_t>(1, *std::max_element(present.begin(), present.end()));
  const std::vector<plan::ShareLimits> limits = in_time(context, i);
  PolicyContext hopeful = context;
  hopeful.limits = limits;
  std::vector<plan::CostModel> hoped = models;
  const auto hope = [&](bool any_class) {
    bool found = false;
    for (std::size_t j = 0; j < models.size(); ++j) {
      if (present[j] == 0 || (!any_class && estimator.class_of(j) != estimator.class_of(i))) continue;
      found = true;
      if (models[j].seconds(items) < hoped[i].seconds(items)) hoped[i] = models[j];
    }
    return found;
  };
  if (!hope(false)) hope(true);
  return makespan(hopeful, hoped, best_split(hopeful, hoped, false)) <
         (1.0 - kWorthwhile) * makespan(hopeful, hoped, present);
}

/// Moves `wanted` items, or fewer but at least its minimum, from the device with the most items to device `i`.
bool Probe::take(const PolicyContext& context, std::vector<std::int64_t>& shares, std::size_t i, std::int64_t wanted) {
  const std::int64_t grain = context.granularity;
  const auto giver = std::max_element(shares.begin(), shares.end());
  const plan::ShareLimits& limits = context.limits[static_cast<std::size_t>(giver - shares.begin())];
  const std::int64_t spare = (*giver - std::max(limits.minimum, grain)) / grain * grain;
  const std::int64_t items = std::min({wanted, spare, context.limits[i].maximum / grain * grain});
  if (items < std::max(context.limits[i].minimum, grain)) return false;
  *giver -= items;
  shares[i] = items;
  return true;
}

void Probe::observe(const PolicyContext& context, const StepTimings& timings) {
  if (asked_step_ != context.step) return;
  for (const std::size_t i : asked_) {
    const auto found = idle_.find(i);
    const bool late = i < timings.startup_seconds.size() && timings.startup_seconds[i].has_value();
    if (found == idle_.end() || (timings.devices[i].empty() && !late)) continue;
    Idle& idle = found->second;
    if (context.estimator.doubtful(i) || context.startup.doubtful(i)) {
      idle.due_step = context.step;  // once more, at once
      continue;
    }
    if (context.step < idle.due_step) continue;  // a quick one
    idle.wait = std::min(2 * std::max(idle.wait, context.step - idle.since_step), idle.longest_wait);
    idle.since_step = context.step;
    idle.due_step = context.step + idle.wait;
  }
}

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include "balance/explorer.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "balance/target.hpp"
#include "plan/numbers.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

using Shares = Explorer::Shares;
using Models = std::vector<plan::CostModel>;

constexpr double kLargestDrop = 0.75;
constexpr double kLargestRise = 1.0 / 3.0;
constexpr std::size_t kDevicesPerDrop = 4;
constexpr double kMuchSlower = 1.5;       // times slower; the noise of a first step is less
constexpr std::int64_t kLeastGrains = 4;  // of an even share; fewer have no quarter
constexpr int kInformativeSteps = 2;
constexpr int kCalibrations = 4;  // at most, even if all their timings are excluded
constexpr double kKnown = 0.03;   // a smaller error of the fixed part does not matter at twice or half the size

constexpr std::int64_t kFirstWait = 100;
constexpr std::int64_t kFirstWaitOfLate = 8;  // costs nothing: if the device is late again, others run its part
constexpr std::int64_t kLongestWait = 1600;
constexpr int kQuickProbes = 4;
constexpr double kLittleKnown = 0.04;  // a relative error; a larger one can hide a device that is worth taking back
constexpr double kCheap = 0.02;        // of one step: the most that a quick probe may cost
constexpr double kFirstBudget = 0.02;  // of the time since the device lost its work: the most for the first probe
constexpr double kBudget = 0.005;      // of all time: the most for probes in the long run
constexpr double kLongestWaitOfAll = 1e6;

constexpr std::int64_t kGrowEvery = 8;  // steps: rare enough to cost little, and few doublings are needed
constexpr double kStepsPart = 0.5;      // of what a move must promise; it is only one step, which tests the promise
constexpr int kMostHopes = 8;  // enough for doublings of a few classes; after them noise keeps the shape unknown

/// Seconds of an even share by the first step's evidence; 0 where there is none.
double even_seconds(const PolicyContext& context, const Shares& even, std::size_t i) {
  return context.estimator.devices()[i].scale > 0.0 ? context.estimator.model(i).seconds(even[i]) : 0.0;
}

/// Which devices get less: one in four of each class, but at most half of all. They are the first ones of a class or,
/// once there is evidence, the slow ones, because the others wait for these. Each step begins with another class, so
/// that no class is left out twice if there are as many classes as half the devices.
std::vector<bool> choose_drops(const PolicyContext& context, const Shares& even, const std::vector<std::size_t>& active,
                               std::size_t steps) {
  std::vector<bool> drops(context.limits.size(), false);
  std::size_t left = active.size() / 2;
  const std::size_t classes = context.estimator.class_count();
  for (std::size_t c = 0; c < classes; ++c) {
    std::vector<std::size_t> members;
    for (const std::size_t i : active) {
      if (context.estimator.class_of(i) == (c + steps) % classes) members.push_back(i);
    }
    const std::size_t wanted = std::min(left, (members.size() + kDevicesPerDrop - 1) / kDevicesPerDrop);
    for (std::size_t k = 0; k < wanted; ++k) {
      std::size_t worst = k;
      for (std::size_t j = k + 1; j < members.size(); ++j) {
        const double slowest = kMuchSlower * even_seconds(context, even, members[worst]);
        if (even_seconds(context, even, members[j]) > slowest) worst = j;
      }
      std::swap(members[k], members[worst]);
      drops[members[k]] = true;
    }
    left -= wanted;
  }
  return drops;
}

/// Whether the device starts later than the options say.
bool late(const PolicyContext& context, std::size_t i) { return context.startup.seconds(i) > context.startup.given(i); }

/// A context in which device `i` starts as the options say.
struct InTime {
  std::vector<plan::ShareLimits> limits;
  PolicyContext context;
  InTime(const PolicyContext& now, std::size_t i) : limits(now.limits.begin(), now.limits.end()), context(now) {
    limits[i].startup_seconds = now.startup.given(i);
    context.limits = limits;
  }
};

/// Gives device `i` as many items as it can run before the others finish, but at least its minimum. They come from the
/// device with the most items. Returns false if that device cannot give enough.
bool give(const PolicyContext& context, const plan::CostModel& model, double others_seconds, std::size_t i,
          Shares& shares) {
  const std::int64_t grain = context.granularity;
  const plan::ShareLimits& limits = context.limits[i];
  const std::int64_t least = plan::rounded_up(std::max(limits.minimum, grain), grain);
  const std::int64_t fits =
      model.items_within(others_seconds - limits.startup_seconds, std::min(limits.maximum, context.batch_size));
  const auto giver = std::max_element(shares.begin(), shares.end());
  const std::int64_t kept = std::max(context.limits[static_cast<std::size_t>(giver - shares.begin())].minimum, grain);
  const std::int64_t items = std::min(
      {std::max(least, fits / grain * grain), (*giver - kept) / grain * grain, limits.maximum / grain * grain});
  if (items < std::max(limits.minimum, grain)) return false;
  *giver -= items;
  shares[i] = items;
  return true;
}

/// Whether the split would gain if device `i` started in time and were as fast as the fastest working device of its
/// class, or of any class if no other device of its class works. A device that is left out because of reductions or a
/// small batch would stay out at any speed.
bool could_pay(const PolicyContext& context, const Models& models, const Shares& present, std::size_t i) {
  const Estimator& estimator = context.estimator;
  const std::int64_t items = std::max<std::int64_t>(1, *std::max_element(present.begin(), present.end()));
  const InTime hopeful(context, i);
  Models hoped = models;
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
  return makespan(hopeful.context, hoped, best_split(hopeful.context, hoped, false)) <
         (1.0 - kLeastGain) * makespan(hopeful.context, hoped, present);
}

/// Models in which classes without work whose fixed part is unknown get the largest likely fixed part (2 standard
/// errors). None if there is no such class.
std::optional<Models> hopeful_models(const PolicyContext& context, const Models& models, const Shares& present) {
  std::vector<bool> works(context.estimator.class_count(), false);
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i] > 0) works[context.estimator.class_of(i)] = true;
  }
  std::optional<Models> hopeful;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (works[context.estimator.class_of(i)] || !is_little_known(context.estimator, i)) continue;
    if (!hopeful) hopeful = models;
    (*hopeful)[i] = with_fixed_part(context, i, 2.0);
  }
  return hopeful;
}

}  // namespace

std::optional<Shares> Explorer::calibrate(const PolicyContext& context, const Shares& even) {
  const std::int64_t grain = context.granularity;
  std::vector<std::size_t> active;
  for (std::size_t i = 0; i < even.size(); ++i) {
    if (even[i] > 0) active.push_back(i);
  }
  if (active.size() < 2) return std::nullopt;
  const std::vector<bool> drops = choose_drops(context, even, active, static_cast<std::size_t>(calibrations_));
  const auto dropped = static_cast<double>(std::count(drops.begin(), drops.end(), true));
  const auto raised = static_cast<double>(active.size()) - dropped;
  const double most = std::min(1.0, kLargestRise * raised / dropped);
  std::vector<double> times;
  for (const std::size_t i : active) times.push_back(even_seconds(context, even, i));
  const double typical = plan::median_in_place(times);
  Shares shares = even;
  std::int64_t released = 0;
  for (const std::size_t i : active) {
    if (even[i] < kLeastGrains * grain) return std::nullopt;
    if (!drops[i]) continue;
    const double seconds = even_seconds(context, even, i);
    const double fitting = seconds > 0.0 ? 1.0 - typical / seconds : 0.0;  // then it finishes with the others
    const double drop = std::min(most, std::max(kLargestDrop, fitting));
    const std::int64_t all = even[i] / grain;
    const auto grains = std::min(all - 1, static_cast<std::int64_t>(std::floor(drop * static_cast<double>(all))));
    shares[i] -= grains * grain;
    released += grains;
    if (shares[i] < context.limits[i].minimum) return std::nullopt;
  }
  auto raised_left = static_cast<std::int64_t>(raised);
  for (const std::size_t i : active) {
    if (drops[i]) continue;
    const std::int64_t part = released / raised_left--;
    shares[i] += part * grain;
    released -= part;
    if (shares[i] > context.limits[i].maximum) return std::nullopt;
  }
  planned_ = Planned::calibration;
  return shares;
}

std::optional<Shares> Explorer::probe(const PolicyContext& context, const Shares& present) {
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
  const Models models = estimated_models(context);
  const double now = makespan(context, models, present);
  double others = 0.0;
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i] > 0) others = std::max(others, models[i].seconds(present[i]));
  }
  Shares shares = present;
  asked_.clear();
  for (const std::size_t i : idle) {
    Idle& entry = idle_.at(i);
    if (entry.quick >= kQuickProbes && context.step < entry.due_step) continue;
    Shares with = shares;
    if (!give(context, models[i], others, i, with)) continue;
    const bool quick =
        entry.quick < kQuickProbes && context.estimator.error_at(i, static_cast<double>(with[i])) > kLittleKnown;
    if (!quick && context.step < entry.due_step) continue;  // the common case, decided without a split
    // A device whose fixed time alone is estimated to take many steps is probed rarely.
    const double excess = now > 0.0 ? makespan(InTime(context, i).context, models, with) / now - 1.0 : 0.0;
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
    asked_.push_back(i);
  }
  if (asked_.empty()) return std::nullopt;
  planned_ = Planned::probe;
  return shares;
}

std::optional<Shares> Explorer::grow(const PolicyContext& context, const Shares& present) {
  if (context.step % kGrowEvery != 0) return std::nullopt;
  const Models models = estimated_models(context);
  Growth known = growth(context, models);
  if (known.step != known.goal) {
    const Promise promise = promise_of(context, models, present, known.goal, kLeastGain);
    if (promise.gain > kStepsPart * promise.required) {
      planned_ = Planned::growth;
      return std::move(known.step);
    }
  }
  if (hopes_ >= kMostHopes) return std::nullopt;
  const std::optional<Models> hopeful = hopeful_models(context, models, present);
  if (!hopeful) return std::nullopt;
  Growth hoped = growth(context, *hopeful);
  if (makespan(context, *hopeful, hoped.goal) >= (1.0 - kLeastGain) * makespan(context, *hopeful, present)) {
    return std::nullopt;
  }
  planned_ = Planned::hope;
  return std::move(hoped.step);
}

void Explorer::observe(const PolicyContext& context, const StepTimings& timings) {
  if (planned_ == Planned::probe) observe_probe(context, timings);
  if (planned_ == Planned::hope) ++hopes_;
  if (planned_ != Planned::calibration) return;
  const bool evidence = context.estimator.has_evidence();
  bool known = evidence;
  for (std::size_t i = 0; i < context.limits.size(); ++i) {
    known = known && context.estimator.shape_of(i).error() <= kKnown;
  }
  informative_ += evidence ? 1 : 0;
  calibrated_ = known || informative_ >= kInformativeSteps || ++calibrations_ >= kCalibrations;
}

void Explorer::observe_probe(const PolicyContext& context, const StepTimings& timings) {
  for (const std::size_t i : asked_) {
    const auto found = idle_.find(i);
    const bool came = i < timings.startup_seconds.size() && timings.startup_seconds[i].has_value();
    if (found == idle_.end() || (timings.devices[i].empty() && !came)) continue;
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

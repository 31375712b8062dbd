// SPDX-License-Identifier: Apache-2.0
#include "plan/stages/finalists.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "plan/stages/dataflow.hpp"

namespace paceline::plan {
namespace {

// So many plans of each number of stages are tried with noise.
constexpr std::size_t kKept = 3;
// A plan that is slower by this factor without noise does not win with it: the noise of one action in five costs a deep
// pipeline about 10 % of its step, and all plans lose some.
constexpr double kNoiseMatters = 1.25;
// Samples that choose which plans get all of them.
constexpr std::size_t kFewSamples = 8;

/// Less is better among equally quick plans: whatever is less to set up and to hold.
auto size_of(const FoundPlan& plan) {
  const std::int64_t held = std::accumulate(plan.depths.begin(), plan.depths.end(), std::int64_t{0});
  return std::tuple(plan.partition.stages(), plan.micro_batches, held, plan.partition);
}

bool quicker(const FoundPlan& a, const FoundPlan& b) {
  if (a.seconds < b.seconds * (1.0 - kTie)) return true;
  return a.seconds <= b.seconds * (1.0 + kTie) && size_of(a) < size_of(b);
}

}  // namespace

Finalists::Finalists(const StageCosts& costs, const StageOptions& options)
    : costs_(costs),
      options_(options),
      previous_{options.previous_cuts, options.previous_order},
      noisy_(std::ranges::any_of(costs.problem().devices, [](const StageDevice& d) { return d.noise > 0.0; })),
      best_(std::numeric_limits<double>::infinity()),
      quickest_(noisy_ ? costs.devices() : 0) {}

double Finalists::factor() const {
  return 1.0 + (previous_.cuts.empty() ? kTie : std::max(options_.indifference, kTie));
}

double Finalists::limit(std::size_t stages) const {
  double seconds = best_ * factor();
  if (noisy_) {
    const std::vector<FoundPlan>& kept = quickest_[stages - 1];
    seconds = std::max(
        seconds, kept.size() < kKept ? best_ * kNoiseMatters : std::min(best_ * kNoiseMatters, kept.back().seconds));
  }
  return seconds;
}

double Finalists::limit() const { return best_ * (noisy_ ? std::max(factor(), kNoiseMatters) : factor()); }

const FoundPlan* Finalists::best() const { return front_.empty() ? nullptr : &front_.back(); }

void Finalists::offer(const Partition& partition, std::int64_t micro_batches, const Depths& depths) {
  if (!(depths.seconds <= limit(partition.stages()))) return;
  const FoundPlan plan{partition, micro_batches, depths.depths, depths.seconds,
                       costs_.moved_bytes(partition, previous_)};
  best_ = std::min(best_, plan.seconds);
  const auto beaten_by = [](const FoundPlan& slow, const FoundPlan& good) {
    return good.moved_bytes <= slow.moved_bytes && !quicker(slow, good);
  };
  if (std::ranges::none_of(front_, [&](const FoundPlan& other) { return beaten_by(plan, other); })) {
    std::erase_if(front_, [&](const FoundPlan& other) {
      return beaten_by(other, plan) || other.seconds > best_ * factor() * (1.0 + kTie);
    });
    front_.insert(std::ranges::upper_bound(front_, plan.moved_bytes, {}, &FoundPlan::moved_bytes), plan);
  }
  if (!noisy_) return;
  std::vector<FoundPlan>& kept = quickest_[partition.stages() - 1];
  const auto same = std::ranges::find_if(kept, [&](const FoundPlan& other) {
    return other.partition == partition && other.micro_batches == micro_batches;
  });
  if (same != kept.end()) {
    if (quicker(plan, *same)) *same = plan;
  } else {
    kept.push_back(plan);
  }
  std::ranges::sort(kept, quicker);
  if (kept.size() > kKept) kept.pop_back();
}

FoundPlan Finalists::winner() const {
  std::vector<FoundPlan> plans = front_;
  if (noisy_) {
    for (const std::vector<FoundPlan>& kept : quickest_) plans.insert(plans.end(), kept.begin(), kept.end());
    StageClock clock(costs_);
    const auto expect = [&](FoundPlan& plan, std::size_t samples) {
      (void)clock.set(plan.partition, {costs_.problem().batch_size, plan.micro_batches}, options_.most_in_flight);
      std::vector<double> noise;
      for (const std::size_t device : plan.partition.order) noise.push_back(costs_.problem().devices[device].noise);
      plan.seconds =
          noisy_mean(dataflow(schedule_of_depths(plan.depths, plan.micro_batches)), clock.times(), noise, samples);
    };
    // Slack for noise: more in flight on all stages but the last, as far as memory allows.
    const std::size_t given = plans.size();
    for (std::size_t i = 0; i < given; ++i) {
      const BatchSizes sizes(costs_.problem().batch_size, plans[i].micro_batches);
      if (options_.schedule == StageOptions::Kind::gpipe ||
          !clock.set(plans[i].partition, sizes, options_.most_in_flight))
        continue;
      for (const std::int64_t more : {1, 2, 4}) {
        FoundPlan deeper = plans[i];
        for (std::size_t stage = 0; stage + 1 < deeper.depths.size(); ++stage)
          deeper.depths[stage] = std::min(deeper.depths[stage] + more, clock.most_depths()[stage]);
        if (deeper.depths != plans.back().depths && deeper.depths != plans[i].depths)
          plans.push_back(std::move(deeper));
      }
    }
    for (FoundPlan& plan : plans) expect(plan, kFewSamples);
    if (previous_.cuts.empty() && plans.size() > 2 * kKept) {
      std::ranges::sort(plans, quicker);
      plans.resize(2 * kKept);
    }
    for (FoundPlan& plan : plans) expect(plan, kNoiseSamples);
  }
  const double least = std::ranges::min(plans, {}, &FoundPlan::seconds).seconds;
  const FoundPlan* winner = nullptr;
  for (const FoundPlan& plan : plans) {
    if (plan.seconds > least * factor()) continue;
    const bool fewer = winner == nullptr || plan.moved_bytes < winner->moved_bytes;
    if (fewer || (plan.moved_bytes == winner->moved_bytes && quicker(plan, *winner))) winner = &plan;
  }
  return *winner;
}

}  // namespace paceline::plan

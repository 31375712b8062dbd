// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/item_shapes.hpp"

#include <algorithm>
#include <array>
#include <optional>

namespace paceline::internal {
namespace {

constexpr std::size_t kWindow = 512;  // micro-batches; a fit of so many takes well under a millisecond
constexpr std::size_t kLeastTimings = 8;
constexpr double kClearlyBetter = 0.9;
constexpr double kLeastItemPart = 0.05;  // of the time must depend on the items, or the fit says nothing about them

plan::ItemSample sample_of(const ItemTiming& timing, plan::ItemMeasure measure, std::int64_t device) {
  plan::ItemSample sample{.seconds = timing.seconds, .device = device};
  switch (measure) {
    case plan::ItemMeasure::padded:
      sample.tokens = timing.count * timing.longest;
      sample.squared_tokens = sample.tokens * timing.longest;
      break;
    case plan::ItemMeasure::sum:
      sample.tokens = timing.sum;
      sample.squared_tokens = timing.squares;
      break;
    case plan::ItemMeasure::count:
      sample.tokens = sample.squared_tokens = timing.count;
      break;
  }
  return sample;
}

}  // namespace

double work_of(const plan::ItemShape& shape, const ItemTiming& timing) {
  const plan::ItemCost& cost = shape.cost;
  const plan::ItemSample sample = sample_of(timing, shape.measure, 0);
  return cost.fixed_seconds + cost.per_token_seconds * sample.tokens +
         cost.per_squared_token_seconds * sample.squared_tokens;
}

void ItemShapes::add(const ItemTiming& timing) {
  if (timings_.size() == kWindow) timings_.pop_front();
  timings_.push_back(timing);
}

bool ItemShapes::fit(const std::vector<std::int64_t>& since_step) {
  if (timings_.size() < kLeastTimings) return false;
  struct Candidate {
    plan::ItemShape shape;
    double error = 0.0;
  };
  std::optional<Candidate> present;
  std::optional<Candidate> best;
  for (const auto measure : {plan::ItemMeasure::padded, plan::ItemMeasure::sum, plan::ItemMeasure::count}) {
    std::vector<plan::ItemSample> samples;
    samples.reserve(timings_.size());
    for (const ItemTiming& timing : timings_) {
      const bool before = timing.step < since_step[timing.device];
      samples.push_back(
          sample_of(timing, measure, static_cast<std::int64_t>(timing.device + (before ? device_count_ : 0))));
    }
    const plan::ItemCostFit fit = plan::fit_item_cost(samples);
    Candidate candidate{{fit.shape, measure}, fit.relative_rms};
    plan::ItemCost& cost = candidate.shape.cost;
    if (measure == plan::ItemMeasure::count) {
      cost.per_token_seconds += cost.per_squared_token_seconds;
      cost.per_squared_token_seconds = 0.0;
    }
    double all = 0.0;
    for (const ItemTiming& timing : timings_) all += work_of(candidate.shape, timing);
    const double fixed = cost.fixed_seconds * static_cast<double>(timings_.size());
    if (!(all > 0.0) || all - fixed < kLeastItemPart * all) continue;
    if (measure == shape_.measure) present = candidate;
    if (!best || candidate.error < best->error) best = candidate;
  }
  if (!best) return false;
  const Candidate& taken = present && best->error >= kClearlyBetter * present->error ? *present : *best;
  shape_ = taken.shape;
  error_ = taken.error;
  fitted_samples_ = static_cast<std::int64_t>(timings_.size());
  fitted_ = true;
  return true;
}

}  // namespace paceline::internal

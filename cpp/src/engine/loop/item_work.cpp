// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/item_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <optional>
#include <utility>

#include <paceline/error.hpp>

namespace paceline::internal {
namespace {

constexpr double kUnits = 1e6;          // of the first batch, so that shares are exact to a thousandth or better
constexpr double kLeastUnits = 1e3;     // of any batch, so that shares are exact to a percent or better
constexpr double kMostUnits = 1e15;     // doubles are exact up to 9e15
constexpr double kFixedAtFirst = 0.02;  // of a device's time, before anything was measured
constexpr std::int64_t kFitEvery = 64;  // steps, in the end; at first whenever the evidence has doubled
constexpr std::size_t kWindow = 512;    // micro-batches; a fit of so many takes well under a millisecond
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

bool all_free(std::span<const double> costs) {
  return std::all_of(costs.begin(), costs.end(), [](double cost) { return cost == 0.0; });
}

/// The sum of the costs. If no item costs anything, it is the number of items.
double total_of(std::span<const double> costs) {
  if (all_free(costs)) return static_cast<double>(costs.size());
  return std::accumulate(costs.begin(), costs.end(), 0.0);
}

double longest_of(const std::vector<double>& costs, std::int64_t begin, std::int64_t end) {
  return *std::max_element(costs.begin() + begin, costs.begin() + end);
}

const char* described(plan::ItemMeasure measure) {
  switch (measure) {
    case plan::ItemMeasure::padded:
      return "the longest item of the micro-batch, times its items";
    case plan::ItemMeasure::sum:
      return "the sum over the items, without padding";
    case plan::ItemMeasure::count:
      return "the number of items alone, whatever they cost: is a slice trimmed to its longest item?";
  }
  return "";
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

bool ItemShapes::fit(const PerDevice<std::int64_t>& since_step) {
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
          sample_of(timing, measure, static_cast<std::int64_t>(2 * timing.device.number() + (before ? 1 : 0))));
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

void check_costs(std::span<const double> costs) {
  if (costs.empty()) throw InvalidArgument("step: a batch without items; at least one is needed.");
  for (std::size_t k = 0; k < costs.size(); ++k) {
    if (std::isfinite(costs[k]) && costs[k] >= 0.0) continue;
    throw InvalidArgument(
        fmt::format("cost: the cost of item {} is {}; costs must be finite and not negative.", k, costs[k]));
  }
}

ItemWork::ItemWork(const PerDevice<std::string>& device_classes, std::int64_t micro_batch, bool plain_costs)
    : micro_batch_(micro_batch), plain_costs_(plain_costs) {
  for (const auto& [id, name] : device_classes) {
    const auto known = std::ranges::find(classes_, name, &Class::name);
    devices_.add(id, {static_cast<std::size_t>(known - classes_.begin())});
    if (known == classes_.end()) classes_.push_back({name, {}});
  }
}

std::int64_t ItemWork::batch_units(std::span<const double> costs) const {
  if (batch_size_ == 0) return static_cast<std::int64_t>(kUnits);
  const double work = std::clamp(unit_ * total_of(costs), kLeastUnits, kMostUnits);
  const auto factor_to = [&](std::int64_t size) {
    const auto units = static_cast<double>(size);
    return std::max(work / units, units / work);
  };
  if (factor_to(batch_size_) <= std::numbers::sqrt2) return batch_size_;
  const std::int64_t nearest = *std::ranges::min_element(batch_sizes_, {}, factor_to);
  return factor_to(nearest) <= std::numbers::sqrt2 ? nearest : std::llround(work);
}

std::int64_t ItemWork::begin(std::span<const double> costs) {
  const std::int64_t units = batch_units(costs);
  if (batch_size_ == 0) {
    unit_ = kUnits / total_of(costs);
    const double fixed = kFixedAtFirst * kUnits / static_cast<double>(devices_.size());
    for (auto& [id, device] : devices_) device.shape = {.cost = {fixed, unit_, 0.0}};
  }
  batch_size_ = units;
  batch_sizes_.insert(units);
  return units;
}

std::shared_ptr<BatchPlan> ItemWork::arrange(std::span<const double> costs, balance::StepPlan decided,
                                             std::int64_t least_items) const {
  auto made = std::make_shared<BatchPlan>();
  made->size = std::ssize(costs);
  made->balance = std::move(decided);
  made->costs.assign(costs.begin(), costs.end());
  if (all_free(costs)) std::fill(made->costs.begin(), made->costs.end(), 1.0);
  made->least_cost = std::numeric_limits<double>::infinity();
  for (const double cost : made->costs) {
    if (cost > 0.0) made->least_cost = std::min(made->least_cost, cost);
  }
  for (const auto& [id, device] : devices_) {
    made->devices.push_back(id);
    made->shapes.push_back(device.shape);
  }
  const std::vector<double> targets(made->balance.shares.begin(), made->balance.shares.end());
  const std::int64_t most = micro_batch_ > 0 ? micro_batch_ : std::numeric_limits<std::int64_t>::max();
  made->arrangement = plan::arrange_items(made->costs, targets, made->shapes,
                                          {.max_items = most, .min_items = least_items, .plain_costs = plain_costs_});
  for (const std::int64_t item : made->arrangement.order) {
    made->ordered_costs.push_back(made->costs[static_cast<std::size_t>(item)]);
  }
  const auto& [order, bounds, first, work] = made->arrangement;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    made->shares.push_back(bounds[first[d + 1]] - bounds[first[d]]);
    if (made->balance.models.empty()) continue;
    const std::int64_t share = std::max<std::int64_t>(1, made->balance.shares[d]);
    made->seconds_per_work.push_back(made->balance.models[d].seconds(share) / static_cast<double>(share));
  }
  return made;
}

void ItemWork::record(const BatchPlan& plan, const StepRecord& record, const balance::Balancer& balancer) {
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    ItemTiming timing{.device = mb.device,
                      .step = plan.balance.step,
                      .count = static_cast<double>(mb.size()),
                      .longest = longest_of(plan.ordered_costs, mb.begin, mb.end),
                      .seconds = claim.seconds()};
    for (std::int64_t k = mb.begin; k < mb.end; ++k) {
      const double cost = plan.ordered_costs[static_cast<std::size_t>(k)];
      timing.sum += cost;
      timing.squares += cost * cost;
    }
    padding_.own += timing.sum;
    padding_.padded += timing.count * timing.longest;
    padding_.contiguous += timing.count * longest_of(plan.costs, mb.begin, mb.end);
    if (claim.excluded || !(timing.seconds > 0.0) || !(timing.longest > 0.0)) continue;
    classes_[devices_[mb.device].device_class].shapes.add(timing);
  }
  if (++steps_ < next_fit_) return;
  next_fit_ = steps_ + std::min(steps_, kFitEvery);
  refit(balancer);
}

void ItemWork::refit(const balance::Balancer& balancer) {
  PerDevice<std::int64_t> since;
  const balance::BalanceReport report = balancer.report();
  for (std::size_t place = 0; const auto& [id, unused] : devices_) {
    const balance::DeviceReport& device = report.devices[place++];
    since.add(id, device.change_points + device.drifts > 0 ? device.since_step : 0);
  }
  double all = 0.0;  // the total work in all windows by the present shapes, which must stay the same
  for (const Class& one : classes_) {
    for (const ItemTiming& timing : one.shapes.timings()) all += work_of(devices_[timing.device].shape, timing);
  }
  std::vector<bool> fitted;
  for (Class& one : classes_) fitted.push_back(one.shapes.fit(since));
  for (auto& [id, device] : devices_) {
    if (!fitted[device.device_class]) continue;
    plan::ItemShape shape = classes_[device.device_class].shapes.shape();
    double seconds = 0.0;
    for (const Class& one : classes_) {
      for (const ItemTiming& timing : one.shapes.timings()) seconds += work_of(shape, timing);
    }
    const double units = all / seconds;
    shape.cost.fixed_seconds *= units;
    shape.cost.per_token_seconds *= units;
    shape.cost.per_squared_token_seconds *= units;
    device.shape = shape;
  }
}

ItemReport ItemWork::report() const {
  ItemReport report;
  report.steps = steps_;
  report.padding = padding_;
  const auto most = std::ranges::max_element(classes_, {}, [](const Class& one) { return one.shapes.samples(); });
  report.fitted = most->shapes.fitted();
  if (!report.fitted) return report;
  report.device_class = most->name;
  report.shape = most->shapes.shape();
  report.error = most->shapes.error();
  report.samples = most->shapes.samples();
  return report;
}

namespace {

/// `on`: names the device class if there are several.
std::string describe(const ItemShapes& here, const std::string& on) {
  const plan::ItemShape shape = here.shape();
  const std::string square = shape.cost.per_squared_token_seconds > 0.0
                                 ? fmt::format(", {:.3g} ns for its square", 1e9 * shape.cost.per_squared_token_seconds)
                                 : "";
  return fmt::format(
      "  {}times follow {}\n"
      "  {}a micro-batch takes {:.3g} ms and {:.3g} us for each unit of cost{}, within {:.1f} % (of {})\n",
      on, described(shape.measure), on, 1e3 * shape.cost.fixed_seconds, 1e6 * shape.cost.per_token_seconds, square,
      100.0 * here.error(), here.samples());
}

}  // namespace

std::string ItemWork::explain() const {
  std::string out;
  for (const Class& one : classes_) {
    const std::string on = classes_.size() > 1 ? fmt::format("on {}, ", one.name) : "";
    if (one.shapes.fitted()) out += describe(one.shapes, on);
  }
  if (out.empty()) {
    out = "  what an item costs in time is not measured yet: the given costs are taken as they are\n";
  }
  if (padding_.own > 0.0) {
    out += fmt::format(
        "  padded to the longest of each micro-batch, items cost {:.2f} times their own; in slices of the batch as it "
        "came {:.2f} times: {:.0f} % of the padding saved\n",
        padding_.padded / padding_.own, padding_.contiguous / padding_.own, 100.0 * padding_.saved());
  }
  return out;
}

}  // namespace paceline::internal

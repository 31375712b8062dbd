// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/what_if.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include <paceline/error.hpp>

#include "balance/balancer_state.hpp"
#include "balance/target.hpp"
#include "plan/statistics.hpp"
#include "refuse.hpp"

namespace paceline::balance {
namespace {

void require_speed(double speed, const std::string& name) {
  if (std::isfinite(speed) && speed > 0.0) return;
  throw InvalidArgument(fmt::format("what_if: the speed of {} is {}; it is a factor above zero", name, speed), name);
}

void require_device(std::size_t device, std::size_t count, const char* what) {
  if (device < count) return;
  refuse("what_if: {} names device {}: there are {}", what, device, count);
}

/// For one device more than there ever were, the reduction grows as it did from the last but one device to the last.
void extend(std::vector<double>& reduction_seconds, std::size_t devices) {
  if (reduction_seconds.empty()) return;
  while (reduction_seconds.size() < devices + 1) {
    const double last = reduction_seconds.back();
    const double before = reduction_seconds.size() > 2 ? reduction_seconds[reduction_seconds.size() - 2] : last;
    reduction_seconds.push_back(last + std::max(0.0, last - before));
  }
}

std::size_t working(std::span<const plan::ShareLimits> limits) {
  return limits.size() - static_cast<std::size_t>(std::ranges::count(limits, 0, &plan::ShareLimits::maximum));
}

}  // namespace

double Balancer::State::waiting() const { return waits.empty() ? 1.0 : std::max(1.0, plan::median(waits)); }

WhatIfAnswer Balancer::what_if(const WhatIfOptions& asked) const {
  const State& state = *state_;
  const std::size_t count = state.options.devices.size();
  if (!state.estimator.has_evidence() || !state.usual)
    refuse("what_if: nothing is measured yet; run a few steps first");
  if (!asked.speeds.empty() && asked.speeds.size() != count)
    refuse("what_if: {} speeds for {} devices; give a factor for each, or none", asked.speeds.size(), count);
  if (asked.alone && !(std::isfinite(*asked.alone) && *asked.alone > 0.0))
    refuse("what_if: alone is {}; it is a factor above zero", *asked.alone);
  const std::int64_t batch_size = asked.batch_size > 0 ? asked.batch_size : state.usual->batch_size;
  const PolicyContext here = state.context(batch_size);
  plan::SplitOptions split = split_options(here);
  std::vector<plan::CostModel> models = estimated_models(here);
  WhatIfAnswer answer;
  for (const DeviceProfile& device : state.options.devices) answer.names.push_back(device.name);
  const plan::Split best = plan::split_batch(batch_size, models, split);
  const auto step = [&](double seconds, const std::vector<std::int64_t>& shares) {
    const bool several = shares.size() - static_cast<std::size_t>(std::ranges::count(shares, 0)) > 1;
    return seconds * (several ? state.waiting() : 1.0) + asked.overhead_seconds;
  };
  answer.best_seconds = step(best.makespan_seconds, best.shares);
  answer.present_seconds =
      here.incumbent != nullptr ? step(makespan(here, models, *here.incumbent), *here.incumbent) : answer.best_seconds;

  std::vector<std::size_t> measured_by(count);  // whose estimate a device's time rests on
  std::iota(measured_by.begin(), measured_by.end(), std::size_t{0});
  for (const AddedDevice& added : asked.add) {
    require_device(added.like, count, "an added device");
    require_speed(added.speed, added.name);
    answer.names.push_back(added.name);
    models.push_back(state.estimator.model(added.like).scaled(1.0 / added.speed));  // it lends no time
    split.limits.push_back(state.options.devices[added.like].limits);
    measured_by.push_back(added.like);
  }
  for (std::size_t i = 0; i < asked.speeds.size(); ++i) {
    require_speed(asked.speeds[i], answer.names[i]);
    models[i] = models[i].scaled(1.0 / asked.speeds[i]);
  }
  for (const std::size_t device : asked.remove) {
    require_device(device, count, "remove");
    split.limits[device] = {.minimum = 0, .maximum = 0};
  }
  if (working(split.limits) == 0) {
    refuse("what_if: remove leaves no device to run the batch; the devices are {}. Leave one of them, or add one",
           fmt::join(answer.names, ", "));
  }
  const std::size_t present = working(here.limits);
  const std::size_t left = working(split.limits);
  if (asked.alone && left < present) {  // fewer devices slow each other down less
    const double relief =
        std::pow(*asked.alone, static_cast<double>(present - left) / static_cast<double>(present - 1));
    for (plan::CostModel& model : models) model = model.scaled(relief);
  }
  extend(split.reduction_seconds, models.size());
  const plan::Split then = plan::split_batch(batch_size, models, split);
  answer.shares = then.shares;
  answer.seconds = step(then.makespan_seconds, then.shares);
  double latest = -1.0;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (then.shares[i] == 0 || models[i].seconds(then.shares[i]) <= latest) continue;
    latest = models[i].seconds(then.shares[i]);
    answer.error = state.estimator.error_at(measured_by[i], static_cast<double>(then.shares[i]));
  }
  const double change = answer.seconds / answer.best_seconds - 1.0;
  answer.text = fmt::format(
      "a step of {} {} would take {:.4g} ms (+-{:.1f} %) with shares [{}], {:.1f} % {} than the {:.4g} ms that the "
      "devices as they are need at best",
      batch_size, state.options.unit, 1e3 * answer.seconds, 100.0 * answer.error, fmt::join(answer.shares, ", "),
      100.0 * std::abs(change), change > 0.0 ? "longer" : "shorter", 1e3 * answer.best_seconds);
  if (asked.overhead_seconds > 0.0) {
    answer.text +=
        fmt::format("; each of these has {:.4g} ms beside the work of the devices", 1e3 * asked.overhead_seconds);
  }
  if (left < present) {
    answer.text += asked.alone ? "; it rests on steps that one device ran alone"
                               : "; it takes devices to be as fast alone as beside each other, which was not measured";
  }
  return answer;
}

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/box.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>
#include <paceline/sim/random.hpp>

namespace paceline::sim {
namespace {

void require(bool fine, const std::string& message) {
  if (!fine) throw InvalidArgument(message);
}

bool positive(double value) { return std::isfinite(value) && value > 0.0; }
bool not_negative(double value) { return std::isfinite(value) && value >= 0.0; }

void check(const BoxOptions& options) {
  const std::size_t count = options.devices.size();
  require(count > 0, "a box needs at least one device");
  for (const SimDevice& device : options.devices) {
    require(positive(device.speed),
            fmt::format("the speed of {} is {}: it must be above zero", device.name, device.speed));
    require(not_negative(device.fixed_seconds) && not_negative(device.per_item_seconds) &&
                device.fixed_seconds + device.per_item_seconds > 0.0,
            fmt::format("{} takes {} s and {} s per item: neither may be negative, and not both zero", device.name,
                        device.fixed_seconds, device.per_item_seconds));
  }
  require(not_negative(options.noise) && options.noise < 1.0,
          fmt::format("noise is {}: give a fraction below 1", options.noise));
  require(options.spike_probability >= 0.0 && options.spike_probability <= 1.0,
          fmt::format("the probability of a spike is {}", options.spike_probability));
  require(positive(options.spike_factor), fmt::format("the factor of a spike is {}", options.spike_factor));
  for (const Throttle& throttle : options.throttles) {
    require(throttle.device < count, fmt::format("a throttle names device {}: there are {}", throttle.device, count));
    require(positive(throttle.factor), fmt::format("a throttle has factor {}: it must be above zero", throttle.factor));
    require(
        throttle.from >= 0 && throttle.from < throttle.to,
        fmt::format("a throttle lasts from step {} to {}: it must end after it starts", throttle.from, throttle.to));
  }
  for (const Failure& failure : options.failures) {
    require(failure.device < count, fmt::format("a failure names device {}: there are {}", failure.device, count));
    require(failure.step >= 0, fmt::format("a failure is at step {}", failure.step));
  }
}

}  // namespace

Box::Box(BoxOptions options) : options_(std::move(options)) { check(options_); }

double Box::slowdown(std::size_t device, std::int64_t step) const {
  double factor = 1.0 / options_.devices[device].speed;
  for (const Throttle& throttle : options_.throttles) {
    if (throttle.device == device && step >= throttle.from && step < throttle.to) factor *= throttle.factor;
  }
  return factor;
}

bool Box::alive(std::size_t device, std::int64_t step) const {
  return std::none_of(options_.failures.begin(), options_.failures.end(),
                      [&](const Failure& failure) { return failure.device == device && failure.step <= step; });
}

std::vector<plan::CostModel> Box::models(std::int64_t step) const {
  std::vector<plan::CostModel> models;
  for (std::size_t i = 0; i < options_.devices.size(); ++i) {
    const SimDevice& device = options_.devices[i];
    const double factor = slowdown(i, step);
    models.push_back(plan::CostModel::affine(device.fixed_seconds * factor, device.per_item_seconds * factor));
  }
  return models;
}

double Box::makespan(std::int64_t step, const std::vector<std::int64_t>& shares) const {
  const std::vector<plan::CostModel> truth = models(step);
  double longest = 0.0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] > 0) longest = std::max(longest, truth[i].seconds(shares[i]));
  }
  return longest;
}

double Box::ideal(std::int64_t step, std::int64_t batch_size) const {
  plan::SplitOptions split;
  for (std::size_t i = 0; i < options_.devices.size(); ++i) {
    split.limits.push_back(alive(i, step) ? options_.devices[i].limits : plan::ShareLimits{.minimum = 0, .maximum = 0});
  }
  return makespan(step, plan::split_batch(batch_size, models(step), split).shares);
}

StepOutcome Box::run(std::int64_t step, const std::vector<std::int64_t>& shares) {
  require(shares.size() == options_.devices.size(),
          fmt::format("{} shares for {} devices", shares.size(), options_.devices.size()));
  const std::vector<plan::CostModel> truth = models(step);
  StepOutcome outcome;
  outcome.timings.devices.resize(shares.size());
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) continue;
    if (!alive(i, step)) {
      outcome.failed_device = outcome.failed_device.value_or(i);
      continue;
    }
    Random random(options_.seed, static_cast<std::uint64_t>(step), i);
    double seconds = truth[i].seconds(shares[i]) * std::exp(options_.noise * random.normal());
    if (random.uniform() < options_.spike_probability) seconds *= options_.spike_factor;
    outcome.timings.devices[i].push_back({shares[i], seconds});
    outcome.seconds = std::max(outcome.seconds, seconds);
  }
  now_seconds_ += outcome.seconds;
  outcome.timings.step_seconds = outcome.seconds;
  if (outcome.failed_device) outcome.timings = {};
  return outcome;
}

}  // namespace paceline::sim

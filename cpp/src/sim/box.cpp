// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/box.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <paceline/plan/random.hpp>
#include <paceline/plan/split.hpp>

#include "refuse.hpp"

namespace paceline::sim {
namespace {

bool positive(double value) { return std::isfinite(value) && value > 0.0; }
bool not_negative(double value) { return std::isfinite(value) && value >= 0.0; }

void check(const BoxOptions& options) {
  const std::size_t count = options.devices.size();
  require(count > 0, "a box needs at least one device");
  const auto require_device = [&](const char* event, std::size_t device) {
    require(device < count, "{} names device {}: there are {}", event, device, count);
  };
  const auto require_steps = [](const char* event, std::int64_t from, std::int64_t to) {
    require(from >= 0 && from < to, "{} lasts from step {} to {}: it must end after it starts", event, from, to);
  };
  for (const auto& [name, device_class, speed, fixed, per_item, limits, first_run] : options.devices) {
    require(positive(speed), "the speed of {} is {}: it must be above zero", name, speed);
    require(not_negative(fixed) && not_negative(per_item) && fixed + per_item > 0.0,
            "{} takes {} s and {} s per item: neither may be negative, and not both zero", name, fixed, per_item);
    require(not_negative(first_run), "the first run of a size on {} takes {} s more", name, first_run);
  }
  require(not_negative(options.noise) && options.noise < 1.0, "noise is {}: give a fraction below 1", options.noise);
  for (const auto& [deviation, steps, common] : options.lasting_noise) {
    require(not_negative(deviation) && deviation < 1.0 && positive(steps),
            "lasting noise of {} over {} steps: give a fraction below 1 and a number of steps above zero", deviation,
            steps);
  }
  require(options.spike_probability >= 0.0 && options.spike_probability <= 1.0, "the probability of a spike is {}",
          options.spike_probability);
  require(positive(options.spike_factor), "the factor of a spike is {}", options.spike_factor);
  for (const auto& [device, factor, from, to] : options.throttles) {
    require_device("a throttle", device);
    require(positive(factor), "a throttle has factor {}: it must be above zero", factor);
    require_steps("a throttle", from, to);
  }
  for (const auto& [device, first, last, from, to] : options.drifts) {
    require_device("a drift", device);
    require(positive(first) && positive(last), "a drift goes from factor {} to {}: both must be above zero", first,
            last);
    require_steps("a drift", from, to);
  }
  for (const auto& [device, seconds, first, every] : options.pauses) {
    require_device("a pause", device);
    require(not_negative(seconds), "a pause takes {} s", seconds);
    require(first >= 0 && every >= 0, "a pause comes first at step {} and every {} steps", first, every);
  }
  for (const auto& [device, seconds, from, to] : options.late_starts) {
    require_device("a late start", device);
    require(not_negative(seconds), "a start is {} s late", seconds);
    require_steps("a late start", from, to);
  }
  require(options.reduction_seconds.empty() || options.reduction_seconds.size() == count + 1,
          "reduction_seconds has {} entries for {} devices: one per number of devices, from 0",
          options.reduction_seconds.size(), count);
  for (const auto& [device, step] : options.failures) {
    require_device("a failure", device);
    require(step >= 0, "a failure is at step {}", step);
  }
}

}  // namespace

Box::Box(BoxOptions options) : options_(std::move(options)), sizes_run_(options_.devices.size()) { check(options_); }

double Box::slowdown(std::size_t device, std::int64_t step) const {
  double factor = 1.0 / options_.devices[device].speed;
  for (const Throttle& throttle : options_.throttles) {
    if (throttle.device == device && step >= throttle.from && step < throttle.to) factor *= throttle.factor;
  }
  for (const Drift& drift : options_.drifts) {
    if (drift.device != device) continue;
    const auto length = static_cast<double>(drift.to - drift.from);
    const double part = std::clamp(static_cast<double>(step - drift.from) / length, 0.0, 1.0);
    factor *= drift.first_factor + part * (drift.last_factor - drift.first_factor);
  }
  return factor;
}

double Box::pause(std::size_t device, std::int64_t step) const {
  double seconds = 0.0;
  for (const Pause& pause : options_.pauses) {
    if (pause.device != device || step < pause.first) continue;
    const std::int64_t since = step - pause.first;
    if (since == 0 || (pause.every > 0 && since % pause.every == 0)) seconds += pause.seconds;
  }
  return seconds;
}

double Box::reduction(const std::vector<std::int64_t>& shares) const {
  if (options_.reduction_seconds.empty()) return 0.0;
  const auto working = std::count_if(shares.begin(), shares.end(), [](std::int64_t share) { return share > 0; });
  return options_.reduction_seconds[static_cast<std::size_t>(working)];
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

std::vector<double> Box::late(std::int64_t step) const {
  std::vector<double> seconds(options_.devices.size(), 0.0);
  for (const LateStart& late : options_.late_starts) {
    if (step >= late.from && step < late.to) seconds[late.device] += late.seconds;
  }
  return seconds;
}

double Box::makespan(std::int64_t step, const std::vector<std::int64_t>& shares) const {
  const std::vector<plan::CostModel> truth = models(step);
  const std::vector<double> begin = late(step);
  double longest = 0.0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) continue;
    const double startup = options_.devices[i].limits.startup_seconds + begin[i];
    longest = std::max(longest, startup + truth[i].seconds(shares[i]));
  }
  return longest + reduction(shares);
}

double Box::ideal(std::int64_t step, std::int64_t batch_size) const {
  return makespan(step, best_split(step, batch_size));
}

std::vector<std::int64_t> Box::best_split(std::int64_t step, std::int64_t batch_size) const {
  plan::SplitOptions split;
  split.reduction_seconds = options_.reduction_seconds;
  const std::vector<double> begin = late(step);
  for (std::size_t i = 0; i < options_.devices.size(); ++i) {
    split.limits.push_back(alive(i, step) ? options_.devices[i].limits : plan::ShareLimits{.minimum = 0, .maximum = 0});
    split.limits.back().startup_seconds += begin[i];
  }
  return plan::split_batch(batch_size, models(step), split).shares;
}

/// Each value follows from that of the step before, so all steps up to this one are computed.
double Box::lasting_noise(std::size_t device, std::int64_t step) {
  const std::vector<LastingNoise>& terms = options_.lasting_noise;
  if (terms.empty()) return 0.0;
  const std::size_t count = options_.devices.size();
  lasting_.resize(terms.size(), std::vector<double>(count, 0.0));
  while (lasting_noise_.size() <= static_cast<std::size_t>(step)) {
    const std::size_t k = lasting_noise_.size();
    std::vector<double> sums(count, 0.0);
    for (std::size_t t = 0; t < terms.size(); ++t) {
      const double kept = k == 0 ? 0.0 : std::exp(-1.0 / terms[t].steps);
      const double fresh = terms[t].deviation * std::sqrt(1.0 - kept * kept);
      for (std::size_t i = 0; i < count; ++i) {
        // The independent noise draws from the keys of the devices, so these keys are above them.
        const std::size_t key = (t + 1) * (count + 1) + (terms[t].common ? count : i);
        lasting_[t][i] = kept * lasting_[t][i] + fresh * plan::Random(options_.seed, k, key).normal();
        sums[i] += lasting_[t][i];
      }
    }
    lasting_noise_.push_back(std::move(sums));
  }
  return lasting_noise_[static_cast<std::size_t>(step)][device];
}

StepOutcome Box::run(std::int64_t step, const std::vector<std::int64_t>& shares) {
  require(shares.size() == options_.devices.size(), "{} shares for {} devices", shares.size(), options_.devices.size());
  const std::vector<plan::CostModel> truth = models(step);
  const std::vector<double> begin = late(step);
  StepOutcome outcome;
  outcome.timings.devices.resize(shares.size());
  if (!options_.late_starts.empty()) outcome.timings.startup_seconds.resize(shares.size());
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) continue;
    if (!alive(i, step)) {
      outcome.failed_device = outcome.failed_device.value_or(i);
      continue;
    }
    plan::Random random(options_.seed, static_cast<std::uint64_t>(step), i);
    const double noise = options_.noise * random.normal() + lasting_noise(i, step);
    double seconds = truth[i].seconds(shares[i]) * std::exp(noise);
    if (random.uniform() < options_.spike_probability) seconds *= options_.spike_factor;
    seconds += pause(i, step);
    const SimDevice& device = options_.devices[i];
    const bool first_run = device.first_run_seconds > 0.0 && sizes_run_[i].insert(shares[i]).second;
    if (first_run) {
      seconds += device.first_run_seconds;
      outcome.first_run_seconds = std::max(outcome.first_run_seconds, device.first_run_seconds);
    }
    outcome.timings.devices[i].push_back({shares[i], seconds, first_run});
    const double startup = device.limits.startup_seconds + begin[i];
    if (!options_.late_starts.empty()) outcome.timings.startup_seconds[i] = startup;
    outcome.seconds = std::max(outcome.seconds, startup + seconds);
  }
  outcome.timings.step_seconds = outcome.seconds;
  outcome.timings.reduction_seconds = reduction(shares);
  outcome.seconds += outcome.timings.reduction_seconds;
  now_seconds_ += outcome.seconds;
  if (outcome.failed_device) outcome.timings = {};
  return outcome;
}

}  // namespace paceline::sim

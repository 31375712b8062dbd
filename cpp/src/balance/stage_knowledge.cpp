// SPDX-License-Identifier: Apache-2.0
#include "balance/stage_knowledge.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "balance/bounded.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kSettled = 3;           // steps: the fewest whose middle one is no outlier
constexpr double kBelievedOfBlocks = 1.5;     // blocks were measured; devices change by more
constexpr double kDeviationErrors = 3.0;      // standard errors; smaller deviations of new blocks are chance
constexpr double kLeastCorrection = 0.02;     // below, no cut would move
constexpr std::int64_t kRecentlySeen = 16;    // steps without a stage after which a device's speed may be another
constexpr std::int64_t kTryDeviceAfter = 64;  // steps without a stage
constexpr double kTryPart = 0.05;             // of these steps, that a try may cost
constexpr std::int64_t kLongestTryDeviceAfter = 4096;
constexpr double kLeftOutSlowdown = 1.05;  // over the best scale: a device that is left out for its speed
constexpr std::size_t kNoiseSteps = 32;
constexpr std::size_t kLeastActions = 3;  // of a kind; the deviations of fewer say little
constexpr double kWorkUnit = 1e9;         // the estimator counts whole items: here nanoseconds of predicted work

std::vector<DeviceProfile> profiles(const plan::StageProblem& problem) {
  // One class for all, since scales are relative to the given speeds: they are equal until measured otherwise.
  std::vector<DeviceProfile> out;
  for (const plan::StageDevice& device : problem.devices) out.push_back({device.name, "stage", {}});
  return out;
}

/// The standard deviation of the times over what `sizes` predict. Adds to `squares` and `freedoms`.
void add_deviations(std::span<const double> seconds, std::span<const std::int64_t> sizes, double fixed, double per_item,
                    double& squares, double& freedoms) {
  std::vector<double> ratios;
  double mean = 0.0;
  for (std::size_t j = 0; j < seconds.size(); ++j) {
    const double predicted = fixed + per_item * static_cast<double>(sizes[j]);
    if (!(predicted > 0.0) || !(seconds[j] > 0.0)) return;
    ratios.push_back(seconds[j] / predicted);
    mean += ratios.back() / static_cast<double>(seconds.size());
  }
  if (ratios.size() < kLeastActions) return;
  for (const double ratio : ratios) squares += (ratio / mean - 1.0) * (ratio / mean - 1.0);
  freedoms += static_cast<double>(ratios.size() - 1);
}

}  // namespace

StageKnowledge::StageKnowledge(plan::StageProblem problem)
    : problem_(std::move(problem)), estimator_(profiles(problem_), true), devices_(problem_.devices.size()) {
  for (Device& device : devices_) device.try_after = kTryDeviceAfter;
}

StageKnowledge::Sample StageKnowledge::predict(std::size_t device, Range blocks, const plan::StagePlan& plan) const {
  Sample out;
  const auto count = static_cast<double>(plan.sizes.size());
  double items = 0.0;
  for (const std::int64_t size : plan.sizes) items += static_cast<double>(size);
  const double speed = problem_.devices[device].speed;
  for (std::size_t b = blocks.begin; b < blocks.end; ++b) {
    const plan::BlockCost& block = problem_.blocks[b];
    out.predicted_forward += (block.forward_fixed * count + block.forward_per_item * items) / speed;
    out.predicted_backward += (block.backward_fixed * count + block.backward_per_item * items) / speed;
  }
  return out;
}

void StageKnowledge::record(std::int64_t step, const plan::StagePlan& plan, std::span<const MeasuredStage> stages) {
  StepTimings timings;
  timings.devices.resize(devices_.size());
  std::vector<std::size_t> settled;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const std::size_t id = plan.order[i];
    Device& device = devices_[id];
    const Range blocks{plan.cuts[i], i + 1 < plan.cuts.size() ? plan.cuts[i + 1] : problem_.blocks.size()};
    const bool others = !(device.blocks == blocks);
    if (!device.last_seen || others || step > *device.last_seen + 1) {
      const bool recent = device.last_seen && step - *device.last_seen <= kRecentlySeen && !device.settling;
      device.tried_again = trying_again(id, step);
      device.known = std::exchange(device.blocks, blocks);
      device.judging = recent && others && estimator_.devices()[id].samples > 0 && !estimator_.doubtful(id);
      device.waiting.clear();
      device.settling = true;
      hurry_ = false;
    }
    device.last_seen = step;
    if (stages[i].excluded) continue;
    Sample sample = predict(id, blocks, plan);
    for (const double seconds : stages[i].forwards) sample.forward += seconds;
    for (const double seconds : stages[i].backwards) sample.backward += seconds;
    sample.step = step;
    if (!(sample.predicted() > 0.0) || !(sample.forward + sample.backward > 0.0)) continue;
    measure_noise(device, plan, stages[i]);
    if (device.settling) {
      device.waiting.push_back(sample);
      // A device that is tried again and is still nearer to its old speed has failed at once.
      const bool failed = device.tried_again && sample.ratio() > std::sqrt(scale(id) * best_scale());
      if (device.waiting.size() == kSettled || failed) settled.push_back(id);
      if (device.judging) continue;
    }
    timings.devices[id].push_back(
        {std::max<std::int64_t>(1, std::llround(sample.predicted() * kWorkUnit)), sample.forward + sample.backward});
  }
  estimator_.record(step, timings);
  for (const std::size_t id : settled) settle(id, plan);
}

void StageKnowledge::measure_noise(Device& device, const plan::StagePlan& plan, const MeasuredStage& timings) {
  double fixed[2] = {0.0, 0.0};
  double per_item[2] = {0.0, 0.0};
  for (std::size_t b = device.blocks.begin; b < device.blocks.end; ++b) {
    const plan::BlockCost& block = problem_.blocks[b];
    fixed[0] += block.forward_fixed;
    fixed[1] += block.backward_fixed;
    per_item[0] += block.forward_per_item;
    per_item[1] += block.backward_per_item;
  }
  double squares = 0.0;
  double freedoms = 0.0;
  add_deviations(timings.forwards, plan.sizes, fixed[0], per_item[0], squares, freedoms);
  add_deviations(timings.backwards, plan.sizes, fixed[1], per_item[1], squares, freedoms);
  if (!(freedoms > 0.0)) return;
  keep_last(device.action_noise, std::sqrt(squares / freedoms), kNoiseSteps);
}

/// The present blocks have run for some steps.
void StageKnowledge::settle(std::size_t id, const plan::StagePlan& plan) {
  Device& device = devices_[id];
  std::vector<Sample> samples = std::exchange(device.waiting, {});
  device.settling = false;
  if (device.tried_again) {
    device.tried_again = false;
    const bool slow = scale(id) > kLeftOutSlowdown * best_scale();
    hurry_ = hurry_ || slow;
    device.try_after = slow ? std::min(2 * device.try_after, kLongestTryDeviceAfter) : kTryDeviceAfter;
  }
  std::vector<Sample> sorted = samples;
  std::ranges::sort(sorted, {}, &Sample::ratio);
  correct_blocks(id, plan, sorted[sorted.size() / 2]);
  if (!std::exchange(device.judging, false)) return;
  for (const Sample& sample : samples) {  // the estimator has not had them yet
    StepTimings timings;
    timings.devices.resize(devices_.size());
    const Sample now = predict(id, device.blocks, plan);
    const double work = now.predicted() * sample.predicted() / samples.back().predicted();
    timings.devices[id].push_back(
        {std::max<std::int64_t>(1, std::llround(work * kWorkUnit)), sample.forward + sample.backward});
    estimator_.record(sample.step, timings);
  }
}

/// Makes the costs of the present blocks agree with their time, if it was no chance.
void StageKnowledge::correct_blocks(std::size_t id, const plan::StagePlan& plan, const Sample& middle) {
  const Device& device = devices_[id];
  const DeviceEstimate& estimate = estimator_.devices()[id];
  const double chance = std::max(
      kLeastCorrection, kDeviationErrors * std::hypot(estimate.error, plan::median_error(estimate.noise, kSettled)));
  if (device.judging) {
    const auto known = [&](std::size_t b) { return b >= device.known.begin && b < device.known.end; };
    Sample came;
    for (std::size_t b = device.blocks.begin; b < device.blocks.end; ++b) {
      if (known(b)) continue;
      const Sample one = predict(id, {b, b + 1}, plan);
      came.predicted_forward += one.predicted_forward;
      came.predicted_backward += one.predicted_backward;
    }
    // Without new blocks those that are gone cost other than thought, so the rest does, too.
    const bool rest = !(came.predicted() > 0.0);
    const double deviation = middle.ratio() / scale(id) - 1.0;
    const double factor = 1.0 + deviation * middle.predicted() / (rest ? middle.predicted() : came.predicted());
    if (std::abs(deviation) > chance && factor < kBelievedOfBlocks && factor > 1.0 / kBelievedOfBlocks) {
      for (std::size_t b = device.blocks.begin; b < device.blocks.end; ++b) {
        if (!rest && known(b)) continue;
        plan::BlockCost& block = problem_.blocks[b];
        for (double* cost :
             {&block.forward_fixed, &block.forward_per_item, &block.backward_fixed, &block.backward_per_item}) {
          *cost *= factor;
        }
      }
    }
  }
  // How the time divides into forward and backward says nothing about the device.
  const Sample now = predict(id, device.blocks, plan);
  if (!(now.predicted_forward > 0.0) || !(now.predicted_backward > 0.0)) return;
  const double measured = middle.forward + middle.backward;
  const double forward = middle.forward / measured * now.predicted() / now.predicted_forward;
  const double backward = middle.backward / measured * now.predicted() / now.predicted_backward;
  if (std::max(std::abs(forward - 1.0), std::abs(backward - 1.0)) <= chance) return;
  for (std::size_t b = device.blocks.begin; b < device.blocks.end; ++b) {
    plan::BlockCost& block = problem_.blocks[b];
    block.forward_fixed *= forward;
    block.forward_per_item *= forward;
    block.backward_fixed *= backward;
    block.backward_per_item *= backward;
  }
}

bool StageKnowledge::unsettled() const {
  if (hurry_) return false;
  return estimator_.unsettled() ||
         std::ranges::any_of(devices_, [](const Device& device) { return device.settling && device.judging; });
}

/// The least scale of a device that was measured. Where a speed is not known it counts as this: a device that seems
/// slower than it is would never be measured.
double StageKnowledge::best_scale() const {
  double best = 0.0;
  for (std::size_t id = 0; id < devices_.size(); ++id) {
    if (estimator_.devices()[id].scale <= 0.0) continue;
    const double scale = estimator_.model(id).per_item_seconds() * kWorkUnit;
    best = best > 0.0 ? std::min(best, scale) : scale;
  }
  return best > 0.0 ? best : 1.0;
}

/// Measured over predicted time.
double StageKnowledge::scale(std::size_t id) const {
  if (estimator_.devices()[id].scale <= 0.0) return best_scale();
  return estimator_.model(id).per_item_seconds() * kWorkUnit;
}

bool StageKnowledge::trying_again(std::size_t id, std::int64_t step) const {
  const Device& device = devices_[id];
  if (device.tried_again) return true;
  const double slowdown = scale(id) / best_scale();
  if (!device.last_seen || slowdown <= kLeftOutSlowdown) return false;
  const double wait = static_cast<double>(device.try_after) *
                      std::max(1.0, slowdown / (kTryPart * static_cast<double>(kTryDeviceAfter)));
  return static_cast<double>(step - *device.last_seen) > wait;
}

plan::StageProblem StageKnowledge::problem(std::int64_t step) const {
  plan::StageProblem out = problem_;
  for (std::size_t id = 0; id < devices_.size(); ++id) {
    plan::StageDevice& device = out.devices[id];
    device.speed /= trying_again(id, step) ? best_scale() : scale(id);
    if (devices_[id].action_noise.size() >= kSettled) device.noise = plan::median(devices_[id].action_noise);
  }
  return out;
}

}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include "balance/estimator.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "balance/bounded.hpp"
#include "balance/clusters.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

// Long enough that the standard error at 3 % noise (0.3 %) is well under the 1 % that matters, short enough
// that a slow drift below the change-point threshold is half forgotten in 64 steps.
constexpr std::size_t kWindow = 128;
// In a drift no single step stands out, so the newest samples are compared with all before them.
constexpr std::size_t kRecent = 24;
constexpr double kDrift = 0.015;
constexpr double kDriftErrors = 4.0;        // with 3, most runs of eight equal devices would find one
constexpr std::int64_t kDriftEvery = 8;     // steps; looking more often costs time and finds more false ones
constexpr double kPriorNoise = 0.04;        // between steady shapes (0.5 %) and variable lengths (5 %)
constexpr double kPriorNoiseSamples = 8.0;  // what it weighs against measured samples
constexpr std::size_t kPooledSamples = 32;  // of each device; more would only cost time
constexpr double kLeastNoise = 0.002;       // clocks and schedulers allow no better
constexpr std::size_t kKnownSamples = 16;   // with fewer, the error of the scale would go into the common factor
constexpr double kShapeInNoise = 0.5;       // of the noise; a larger error of the shape would go there, too
constexpr std::size_t kFactors = 32;        // steps: the usual common factor follows clocks and neighbours
constexpr double kUnmeasuredError = 0.3;    // of a device that never ran, whose estimate is that of another one

/// A standard deviation from `count` samples and a prior that weighs as much as `weight` samples.
double shrunk(double deviation, double count, double prior, double weight = kPriorNoiseSamples) {
  return std::sqrt((count * deviation * deviation + weight * prior * prior) / (count + weight));
}

}  // namespace

std::vector<plan::CostModel> completed_models(std::span<const std::optional<plan::CostModel>> models,
                                              std::span<const std::size_t> classes) {
  std::vector<plan::CostModel> all;
  for (std::size_t i = 0; i < models.size(); ++i) {
    const auto rank = [&](std::size_t j) { return std::pair(classes[j] != classes[i], models[j]->seconds(1)); };
    const std::size_t none = models.size();
    std::size_t best = models[i] ? i : none;
    for (std::size_t j = 0; !models[i] && j < models.size(); ++j) {
      if (models[j] && (best == none || rank(j) < rank(best))) best = j;
    }
    if (best == none) return {};
    all.push_back(*models[best]);
  }
  return all;
}

Estimator::Estimator(const std::vector<DeviceProfile>& profiles, bool proportional)
    : estimates_(profiles.size()), memory_(profiles.size()), pooled_noise_(kPriorNoise) {
  std::map<std::string, std::size_t> classes;
  std::vector<std::size_t> sizes;
  for (const DeviceProfile& profile : profiles) {
    const std::size_t number = classes.emplace(profile.device_class, classes.size()).first->second;
    if (number == sizes.size()) sizes.push_back(0);
    Device& device = devices_.emplace_back();
    device.device_class = number;
    device.member = sizes[number]++;
  }
  for (const std::size_t size : sizes) shapes_.emplace_back(size, proportional);
  for (DeviceEstimate& estimate : estimates_) {
    estimate.noise = kPriorNoise;
    estimate.error = kUnmeasuredError;
  }
}

void Estimator::hint(std::size_t device, const plan::CostModel& model) {
  shapes_[devices_[device].device_class].hint(model.fixed_seconds() / model.per_item_seconds());
}

Estimator::Evidence Estimator::evidence_of(std::int64_t step, const std::vector<MicroBatchTiming>& timings) {
  Evidence evidence;
  evidence.step = step;
  for (const MicroBatchTiming& timing : timings) {
    if (timing.excluded || timing.items <= 0 || !(timing.seconds > 0.0)) continue;
    evidence.sample.seconds += timing.seconds;
    evidence.sample.count += 1.0;
    evidence.sample.items += static_cast<double>(timing.items);
    evidence.parts.push_back(timing);
  }
  return evidence;
}

/// The reference size of a class is the mean of its devices' largest micro-batches in its first step with evidence.
void Estimator::set_references(const std::vector<Evidence>& evidence) {
  for (std::size_t c = 0; c < shapes_.size(); ++c) {
    if (shapes_[c].has_reference()) continue;
    double sum = 0.0;
    double count = 0.0;
    for (std::size_t i = 0; i < evidence.size(); ++i) {
      if (devices_[i].device_class != c || evidence[i].parts.empty()) continue;
      std::int64_t most = 0;
      for (const MicroBatchTiming& part : evidence[i].parts) most = std::max(most, part.items);
      sum += static_cast<double>(most);
      count += 1.0;
    }
    if (count > 0.0) shapes_[c].set_reference(sum / count);
  }
}

void Estimator::record(std::int64_t step, const StepTimings& timings) {
  std::vector<Evidence> evidence;
  for (const auto& device : timings.devices) evidence.push_back(evidence_of(step, device));
  set_references(evidence);
  separate_common_noise(evidence);
  for (std::size_t i = 0; i < evidence.size(); ++i) {
    if (evidence[i].parts.empty()) continue;
    take(i, std::move(evidence[i]));
    follow_drift(i, step);
  }
  for (ShapeEstimator& shape : shapes_) shape.fit(pooled_noise_);
  measure_common_noise();
  measure_scales();
  pool_equals();
}

double Estimator::ratio(std::size_t device, const Sample& sample) const {
  return sample.seconds / shape_of(device).shape().sum(sample.count, sample.items);
}

/// The relative error that the shape adds when a sample is compared with the samples of the estimate.
double Estimator::shape_error(std::size_t index, const Sample& sample) const {
  return shape_of(index).ratio_error(estimates_[index].centre_items, sample.items / sample.count);
}

double Estimator::error_of(double noise, std::size_t samples) const {
  return plan::median_error(noise, samples, memory_.variance_factor(samples));
}

/// Takes out of all samples of a step the factor that is common to them.
void Estimator::separate_common_noise(std::vector<Evidence>& evidence) {
  std::size_t working = 0;
  std::size_t most = 0;
  std::vector<std::size_t> known;
  for (std::size_t i = 0; i < evidence.size(); ++i) {
    const Sample& sample = evidence[i].sample;
    if (evidence[i].parts.empty()) continue;
    ++working;
    if (estimates_[i].samples == 0) continue;
    if (shape_error(i, sample) > kShapeInNoise * estimates_[i].noise) continue;
    if (std::abs(deviation(i, sample)) <= tolerance(i, sample)) known.push_back(i);
  }
  for (const std::size_t i : known) most = std::max(most, estimates_[i].samples);
  std::erase_if(known, [&](std::size_t i) { return estimates_[i].samples < std::min(kKnownSamples, most); });
  const bool separable = working > 1 && !known.empty();
  const auto count = static_cast<double>(known.size());
  double log_factor = 0.0;
  if (separable) {
    for (const std::size_t i : known) {
      log_factor += std::log(ratio(i, evidence[i].sample) / devices_[i].relative_scale) / count;
    }
  }
  for (Evidence& one : evidence) {
    one.sample.common = separable ? std::exp(log_factor) : common_level_;
    one.sample.seconds /= one.sample.common;
    if (separable) one.sample.to_own = std::sqrt(count / (count + 1.0));
  }
  if (separable) {
    const double to_own = count > 1.0 ? std::sqrt(count / (count - 1.0)) : 0.0;
    for (const std::size_t i : known) evidence[i].sample.to_own = to_own;
    known_devices_ = count;
  }
  if (!separable && !log_factors_.empty()) return;
  keep_last(log_factors_, log_factor, kFactors);
}

void Estimator::accept(std::size_t device, const Evidence& evidence) {
  devices_[device].last_step = evidence.step;
  for (const MicroBatchTiming& part : evidence.parts) {
    shapes_[devices_[device].device_class].add(devices_[device].member, evidence.step, part.items, part.seconds);
  }
  std::vector<Sample>& window = devices_[device].window;
  // The common factor was taken from this device alone, so its residual is 0 and says nothing.
  if (evidence.sample.to_own <= 0.0 && window.size() >= kKnownSamples) return;
  keep_last(window, evidence.sample, kWindow);
  // The newest samples wait: if the speed changed with them, they would look like noise that lasts.
  if (window.size() <= kRecent) return;
  const Sample& old = window[window.size() - 1 - kRecent];
  if (old.to_own > 0.0) memory_.add(device, (ratio(device, old) / devices_[device].relative_scale - 1.0) * old.to_own);
}

/// Forgets the samples before a drift, if the newest ones differ from them by more than chance.
void Estimator::follow_drift(std::size_t index, std::int64_t step) {
  std::vector<Sample>& window = devices_[index].window;
  if (step % kDriftEvery != 0 || window.size() < 2 * kRecent) return;
  const auto first = window.end() - static_cast<std::ptrdiff_t>(kRecent);
  std::vector<double> residuals;  // about the median of each part, so without the drift
  std::vector<double> ratios;
  const auto centre = [&](auto begin, auto end) {
    ratios.clear();
    for (auto sample = begin; sample != end; ++sample) ratios.push_back(ratio(index, *sample));
    const double middle = plan::median_in_place(ratios);
    for (auto sample = begin; sample != end; ++sample) {
      if (sample->to_own > 0.0) residuals.push_back(std::abs(ratio(index, *sample) / middle - 1.0) * sample->to_own);
    }
    return middle;
  };
  const double before = centre(window.begin(), first);
  const double recent = centre(first, window.end());
  const auto count = static_cast<double>(residuals.size());
  const double noise = std::max(
      kLeastNoise, shrunk(plan::from_median_deviation(plan::median_in_place(residuals)), count, pooled_noise_));
  const double error = std::hypot(error_of(noise, kRecent), error_of(noise, window.size() - kRecent));
  // This device is part of the common factor, which therefore follows some of the drift.
  const double drift = std::abs(recent / before - 1.0) * window.back().to_own;
  if (drift * window.back().to_own <= kDrift || drift <= kDriftErrors * error) return;
  estimates_[index].scale_before = estimates_[index].own_scale;
  window.erase(window.begin(), first);
  shapes_[devices_[index].device_class].restart(devices_[index].member);
  memory_.restart(index);
  ++estimates_[index].drifts;
  devices_[index].change_size = 0.0;
  estimates_[index].since_step = step - static_cast<std::int64_t>(kRecent) + 1;
}

void Estimator::measure_common_noise() {
  const double level = plan::median(log_factors_);
  common_level_ = std::exp(level);
  std::vector<double> factors;
  for (const double factor : log_factors_) factors.push_back(std::abs(factor - level));
  const double deviation = plan::from_median_deviation(plan::median_in_place(factors));
  // The mean over few devices contains their own noise.
  common_noise_ = std::sqrt(std::max(0.0, deviation * deviation - pooled_noise_ * pooled_noise_ / known_devices_));
}

void Estimator::measure_scales() {
  std::vector<double> all;
  std::vector<double> ratios;
  std::vector<double> residuals;
  std::vector<double> deviations(devices_.size(), 0.0);
  std::vector<double> counts(devices_.size(), 0.0);
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    DeviceEstimate& estimate = estimates_[i];
    const std::vector<Sample>& window = devices_[i].window;
    estimate.samples = window.size();
    if (window.empty()) continue;
    double count = 0.0;
    double items = 0.0;
    ratios.clear();
    for (const Sample& sample : window) {
      count += sample.count;
      items += sample.items;
      ratios.push_back(ratio(i, sample));
    }
    estimate.centre_items = items / count;
    devices_[i].relative_scale = plan::median(ratios);
    estimate.own_scale = devices_[i].relative_scale * common_level_;
    // Residuals about the median of few samples, or of correlated ones, are too small by this factor.
    const auto n = static_cast<double>(window.size());
    const double correction = n > 1.0 ? std::sqrt(n / (n - memory_.variance_factor(window.size()))) : 1.0;
    residuals.clear();
    bool middle = false;  // the residual of the median itself is always 0 and does not count
    for (std::size_t j = 0; j < ratios.size(); ++j) {
      const double difference = std::abs(ratios[j] / devices_[i].relative_scale - 1.0);
      if (window[j].to_own <= 0.0 || (difference <= 0.0 && !std::exchange(middle, true))) continue;
      const double residual = correction * difference * window[j].to_own;
      residuals.push_back(residual);
      if (j + kPooledSamples >= ratios.size()) all.push_back(residual);
    }
    counts[i] = static_cast<double>(residuals.size());
    deviations[i] = plan::from_median_deviation(plan::median_in_place(residuals));
  }
  const auto total = static_cast<double>(all.size());
  // A guess counts for less, the more was measured on other devices.
  const double weight = kPriorNoiseSamples / (1.0 + total / kPriorNoiseSamples);
  pooled_noise_ = std::max(kLeastNoise,
                           shrunk(plan::from_median_deviation(plan::median_in_place(all)), total, kPriorNoise, weight));
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    estimates_[i].noise = std::max(kLeastNoise, shrunk(deviations[i], counts[i], pooled_noise_));
  }
}

void Estimator::pool_equals() {
  std::size_t next_cluster = 0;
  for (std::size_t c = 0; c < shapes_.size(); ++c) {
    std::vector<Measured> members;
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      const DeviceEstimate& estimate = estimates_[i];
      if (devices_[i].device_class != c || estimate.samples == 0) continue;
      const double error = error_of(estimate.noise, estimate.samples);
      const std::optional<Grouped>& grouped = devices_[i].grouped;
      const bool same_speed = grouped && grouped->since_step == estimate.since_step;
      members.push_back({i, estimate.own_scale, error, estimate.centre_items,
                         same_speed ? std::optional(grouped->cluster) : std::nullopt});
    }
    for (const Cluster& cluster : cluster_equals(members, shapes_[c])) {
      for (const std::size_t i : cluster.members) {
        estimates_[i].scale = cluster.scale;
        estimates_[i].error = cluster.error;
        estimates_[i].pooled_centre_items = cluster.centre_items;
        estimates_[i].cluster = next_cluster;
        devices_[i].grouped = Grouped{next_cluster, estimates_[i].since_step};
      }
      ++next_cluster;
    }
  }
}

plan::CostModel Estimator::model(std::size_t device) const {
  const auto affine = [&](std::size_t like) {
    const Shape& shape = shape_of(like).shape();
    const double scale = estimates_[like].scale;
    return plan::CostModel::affine(scale * shape.fixed_fraction,
                                   scale * (1.0 - shape.fixed_fraction) / shape.reference_items);
  };
  if (estimates_[device].scale > 0.0) return affine(device);
  // A device that was never measured counts as fast as the fastest of its class, or else of all devices. So it gets
  // work and is measured, also if a hint says that it is too slow to help. Otherwise a wrong hint would hold for good.
  std::vector<std::optional<plan::CostModel>> known(devices_.size());
  std::vector<std::size_t> classes;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    classes.push_back(devices_[i].device_class);
    if (estimates_[i].scale > 0.0) known[i] = affine(i);
  }
  return completed_models(known, classes)[device];
}

double Estimator::error_at(std::size_t device, double items) const {
  const DeviceEstimate& estimate = estimates_[device];
  if (estimate.scale <= 0.0) return kUnmeasuredError;
  return std::hypot(estimate.error, shape_of(device).ratio_error(estimate.pooled_centre_items, items));
}

std::int64_t Estimator::change_points() const {
  std::int64_t sum = 0;
  for (const DeviceEstimate& estimate : estimates_) sum += estimate.change_points;
  return sum;
}

}  // namespace paceline::balance

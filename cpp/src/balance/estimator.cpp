// SPDX-License-Identifier: Apache-2.0
#include "balance/estimator.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <string>
#include <utility>

#include "balance/clusters.hpp"
#include "balance/statistics.hpp"

namespace paceline::balance {
namespace {

// Long enough that the standard error at 3 % noise (0.3 %) is well under the 1 % that matters, short enough
// that a slow drift below the change-point threshold is half forgotten in 64 steps.
constexpr std::size_t kWindow = 128;
constexpr std::size_t kFirstJudged = 3;  // a median of fewer says nothing about outliers, ...
constexpr std::size_t kNextJudged = 2;   // ... but after a change point two agreed, and the noise is known
constexpr double kJump = 0.08;           // smaller shifts reach the median in time
constexpr double kJumpSigmas = 4.0;
constexpr double kShapeSigmas = 3.0;
// A drift has no single step that stands out: the newest samples are held against all before them.
constexpr std::size_t kRecent = 24;
constexpr double kDrift = 0.015;
constexpr double kDriftErrors = 4.0;        // at 3 eight equal devices would see one in most runs
constexpr std::int64_t kDriftEvery = 8;     // steps: looking more often costs time and finds more that is none
constexpr double kPriorNoise = 0.02;        // between steady shapes (0.5 %) and variable lengths (5 %)
constexpr double kPriorNoiseSamples = 8.0;  // what it weighs against measured samples
constexpr std::size_t kPooledSamples = 32;  // of each device; more would only cost time
constexpr double kLeastNoise = 0.002;       // clocks and schedulers allow no better
constexpr double kUnmeasuredError = 0.3;    // a device that never ran is its class or its neighbour, give or take this

}  // namespace

Estimator::Estimator(const std::vector<DeviceProfile>& profiles)
    : devices_(profiles.size()), estimates_(profiles.size()), pooled_noise_(kPriorNoise) {
  std::map<std::string, std::size_t> classes;
  std::vector<std::size_t> sizes;
  for (const DeviceProfile& profile : profiles) {
    const std::size_t number = classes.emplace(profile.device_class, classes.size()).first->second;
    if (number == sizes.size()) sizes.push_back(0);
    class_of_.push_back(number);
    index_in_class_.push_back(sizes[number]++);
  }
  for (const std::size_t size : sizes) shapes_.emplace_back(size);
  for (DeviceEstimate& estimate : estimates_) {
    estimate.noise = kPriorNoise;
    estimate.error = kUnmeasuredError;
  }
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
      if (class_of_[i] != c || evidence[i].parts.empty()) continue;
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
  for (std::size_t i = 0; i < evidence.size(); ++i) {
    if (evidence[i].parts.empty()) continue;
    take(i, std::move(evidence[i]));
    follow_drift(i, step);
  }
  for (ShapeEstimator& shape : shapes_) shape.fit(pooled_noise_);
  measure_scales();
  pool_equals();
}

double Estimator::ratio(std::size_t device, const Sample& sample) const {
  return sample.seconds / shape_of(device).shape().sum(sample.count, sample.items);
}

void Estimator::accept(std::size_t device, const Evidence& evidence) {
  for (const MicroBatchTiming& part : evidence.parts) {
    shapes_[class_of_[device]].add(index_in_class_[device], evidence.step, part.items, part.seconds);
  }
  std::vector<Sample>& window = devices_[device].window;
  if (window.size() == kWindow) window.erase(window.begin());
  window.push_back(evidence.sample);
}

void Estimator::take(std::size_t index, Evidence evidence) {
  has_evidence_ = true;
  Device& device = devices_[index];
  DeviceEstimate& estimate = estimates_[index];
  if (device.window.empty()) estimate.since_step = evidence.step;
  if (device.window.size() < (estimate.change_points == 0 ? kFirstJudged : kNextJudged)) return accept(index, evidence);
  const Sample& sample = evidence.sample;
  const double unknown = shape_of(index).ratio_error(estimate.centre_items, sample.items / sample.count);
  const double tolerance = std::max({kJump, kJumpSigmas * estimate.noise, kShapeSigmas * unknown});
  const auto deviation = [&](const Sample& s) { return ratio(index, s) / estimate.own_scale - 1.0; };
  if (std::abs(deviation(sample)) <= tolerance) {
    device.outlier.reset();  // it was alone
    return accept(index, evidence);
  }
  if (!device.outlier || deviation(device.outlier->sample) * deviation(sample) < 0.0) {
    device.outlier = std::move(evidence);
    return;
  }
  const Evidence first = *std::exchange(device.outlier, std::nullopt);
  estimate.scale_before = estimate.own_scale;
  device.window.clear();
  shapes_[class_of_[index]].restart(index_in_class_[index]);
  ++estimate.change_points;
  // If the two disagree, by more than two noisy times may, the change fell into the first one's step: it is a mixture
  // of both levels.
  if (std::abs(ratio(index, first.sample) / ratio(index, sample) - 1.0) <= std::numbers::sqrt2 * tolerance) {
    estimate.since_step = first.step;
    accept(index, first);
  } else {
    estimate.since_step = evidence.step;
  }
  accept(index, evidence);
}

/// Forgets the samples before a drift: where the newest ones differ from those before by more than chance.
void Estimator::follow_drift(std::size_t index, std::int64_t step) {
  std::vector<Sample>& window = devices_[index].window;
  if (step % kDriftEvery != 0 || window.size() < 2 * kRecent) return;
  const auto first = window.end() - static_cast<std::ptrdiff_t>(kRecent);
  std::vector<double> ratios;
  for (auto sample = first; sample != window.end(); ++sample) ratios.push_back(ratio(index, *sample));
  const double recent = median(ratios);
  ratios.clear();
  for (auto sample = window.begin(); sample != first; ++sample) ratios.push_back(ratio(index, *sample));
  const double noise = estimates_[index].noise;
  const double error = std::hypot(median_error(noise, kRecent), median_error(noise, ratios.size()));
  if (std::abs(recent / median(ratios) - 1.0) <= std::max(kDrift, kDriftErrors * error)) return;
  estimates_[index].scale_before = estimates_[index].own_scale;
  window.erase(window.begin(), first);
  shapes_[class_of_[index]].restart(index_in_class_[index]);
  ++estimates_[index].drifts;
  estimates_[index].since_step = step - static_cast<std::int64_t>(kRecent) + 1;
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
    residuals = ratios;
    estimate.own_scale = median(residuals);
    // Residuals about a median of few samples are too small by this factor.
    const auto n = static_cast<double>(window.size());
    const double correction = n > 1.0 ? std::sqrt(n / (n - 1.0)) : 1.0;
    residuals.clear();
    for (std::size_t j = 0; j < ratios.size(); ++j) {
      const double residual = correction * std::abs(ratios[j] / estimate.own_scale - 1.0);
      if (residual <= 0.0) continue;  // the median itself is no evidence of calm
      residuals.push_back(residual);
      if (j + kPooledSamples >= ratios.size()) all.push_back(residual);
    }
    counts[i] = static_cast<double>(residuals.size());
    deviations[i] = from_median_deviation(median(residuals));
  }
  const auto shrink = [](double deviation, double count, double prior) {
    return std::sqrt((count * deviation * deviation + kPriorNoiseSamples * prior * prior) /
                     (count + kPriorNoiseSamples));
  };
  const auto total = static_cast<double>(all.size());
  pooled_noise_ = std::max(kLeastNoise, shrink(from_median_deviation(median(all)), total, kPriorNoise));
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    estimates_[i].noise = std::max(kLeastNoise, shrink(deviations[i], counts[i], pooled_noise_));
  }
}

void Estimator::pool_equals() {
  std::size_t next_cluster = 0;
  for (std::size_t c = 0; c < shapes_.size(); ++c) {
    std::vector<Measured> members;
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      const DeviceEstimate& estimate = estimates_[i];
      if (class_of_[i] != c || estimate.samples == 0) continue;
      const double error = median_error(estimate.noise, estimate.samples);
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
  // Never measured: as fast as the fastest of its class, else as the fastest of all, so that it gets work and is
  // measured.
  std::size_t best = devices_.size();
  bool best_in_class = false;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (estimates_[i].scale <= 0.0) continue;
    const bool in_class = class_of_[i] == class_of_[device];
    const bool better = best == devices_.size() || (in_class && !best_in_class) ||
                        (in_class == best_in_class && affine(i).seconds(1) < affine(best).seconds(1));
    if (!better) continue;
    best = i;
    best_in_class = in_class;
  }
  return affine(best);
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

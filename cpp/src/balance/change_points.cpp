// SPDX-License-Identifier: Apache-2.0
// How the estimator decides that a device's speed has changed.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "balance/bounded.hpp"
#include "balance/estimator.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kFirstJudged = 3;  // samples; the median of fewer does not show outliers
constexpr std::size_t kNextJudged = 2;   // after a change point, which two samples have agreed on
constexpr double kJump = 0.08;           // smaller shifts reach the median in time
constexpr double kJumpSigmas = 3.5;
constexpr double kShapeSigmas = 3.0;
constexpr std::size_t kLeastRun = 2;            // outliers: one alone may be a spike
constexpr double kActedUponAtOnce = 0.336;      // log of 1.4, by which two devices lose a sixth of a step
constexpr double kAlikeExcursion = 1.5;         // an excursion counts for changes up to this many times its size
constexpr std::size_t kExcursions = 32;         // remembered
constexpr std::int64_t kLongestExcursion = 64;  // steps; moves can follow what lasts longer

}  // namespace

/// How far a sample may lie from the estimate by chance, in logs.
double Estimator::tolerance(std::size_t index, const Sample& sample) const {
  const double noise = std::hypot(estimates_[index].noise, common_noise_);
  return std::max({kJump, kJumpSigmas * noise, kShapeSigmas * shape_error(index, sample)});
}

/// How far a sample lies from the estimate, in logs. Common noise is included: of two devices, only the absolute times
/// tell which one changed.
double Estimator::deviation(std::size_t index, const Sample& sample) const {
  return std::log(ratio(index, sample) * sample.common / estimates_[index].own_scale);
}

void Estimator::take(std::size_t index, Evidence evidence) {
  has_evidence_ = true;
  Device& device = devices_[index];
  DeviceEstimate& estimate = estimates_[index];
  if (device.window.empty()) estimate.since_step = evidence.step;
  if (device.window.size() < (estimate.change_points == 0 ? kFirstJudged : kNextJudged)) return accept(index, evidence);
  std::vector<Evidence>& outliers = device.outliers;
  const double allowed = tolerance(index, evidence.sample);
  const double apart = deviation(index, evidence.sample);
  const bool is_outlier = std::abs(apart) > allowed;
  if (!outliers.empty() && !(is_outlier && deviation(index, outliers.back().sample) * apart > 0.0)) {
    if (outliers.size() > 1) undone(run_size(index), outliers.back().step - device.last_step);  // one was alone
    outliers.clear();
  }
  if (!is_outlier) return accept(index, evidence);
  const std::int64_t lasts = evidence.step - device.last_step;
  outliers.push_back(std::move(evidence));
  if (outliers.size() < kLeastRun) return;
  if (is_back(index, allowed) || lasts >= steps_to_believe(run_size(index))) change(index, allowed);
}

/// Whether the outliers are at the speed that the device had before its last change. False if that change itself was
/// such a return.
bool Estimator::is_back(std::size_t index, double allowed) const {
  const Device& device = devices_[index];
  if (device.change_size <= 0.0) return false;
  const double level = ratio(index, device.outliers.back().sample) * common_level_;
  return std::abs(std::log(level / estimates_[index].scale_before)) <= allowed;
}

/// How far the outliers in a row lie from the estimate, in logs: the median.
double Estimator::run_size(std::size_t index) const {
  std::vector<double> sizes;
  for (const Evidence& one : devices_[index].outliers) sizes.push_back(std::abs(deviation(index, one.sample)));
  return plan::median_in_place(sizes);
}

/// For how many steps a change of that size has to last.
std::int64_t Estimator::steps_to_believe(double size) const {
  if (size > kActedUponAtOnce) return 0;
  std::int64_t longest = -1;
  for (const Excursion& one : excursions_) {
    if (kAlikeExcursion * one.size >= size) longest = std::max(longest, one.steps);
  }
  return longest + 1;
}

void Estimator::undone(double size, std::int64_t steps) {
  if (steps > kLongestExcursion || size > kActedUponAtOnce) return;
  keep_last(excursions_, {size, steps}, kExcursions);
}

/// The outliers are the device's new level.
void Estimator::change(std::size_t index, double allowed) {
  Device& device = devices_[index];
  DeviceEstimate& estimate = estimates_[index];
  const bool back = is_back(index, allowed);
  const std::vector<Evidence> run = std::exchange(device.outliers, {});
  std::vector<double> ratios;
  for (const Evidence& one : run) ratios.push_back(ratio(index, one.sample));
  // If the first outlier differs from the last by more than noise explains, the change fell into the first one's step.
  // That time is a mixture of both levels.
  const bool mixed = std::abs(std::log(ratios.front() / ratios.back())) > std::numbers::sqrt2 * allowed;
  const auto begin = run.begin() + (mixed ? 1 : 0);
  if (mixed) ratios.erase(ratios.begin());
  device.relative_scale = plan::median_in_place(ratios);  // residuals refer to this from now on
  // On the way back, the change that ends now was an excursion. The way back itself is none.
  if (back) undone(device.change_size, run.front().step - estimate.since_step);
  const double size = std::abs(std::log(device.relative_scale * common_level_ / estimate.own_scale));
  device.change_size = back ? 0.0 : size;
  estimate.scale_before = estimate.own_scale;
  device.window.clear();
  shapes_[devices_[index].device_class].restart(devices_[index].member);
  memory_.restart(index);
  ++estimate.change_points;
  estimate.since_step = begin->step;
  for (auto one = begin; one != run.end(); ++one) accept(index, *one);
}

bool Estimator::unsettled() const {
  return std::ranges::any_of(devices_, [](const Device& device) { return !device.outliers.empty(); });
}

}  // namespace paceline::balance

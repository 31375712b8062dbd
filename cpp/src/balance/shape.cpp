// SPDX-License-Identifier: Apache-2.0
#include "balance/shape.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "balance/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kSamplesPerCell =
    16;  // the error of the mean is then a quarter of one sample's, and more samples add little
constexpr std::size_t kCellsPerGroup = 6;  // sizes come from a small set: planned chunk, corrections of floor * 2^k
constexpr std::size_t kClosedGroups = 4;
constexpr std::int64_t kStepsPerGroup = 48;  // long against noise, short against heating up
constexpr double kPriorFraction = 0.3;       // fixed parts of 0 to 60 % at an even share are what training shows
constexpr double kPriorError = 0.3;
constexpr double kLargestFraction = 0.98;  // with a slope of zero a device could take any number of items
constexpr double kHuber = 1.5;             // deviations beyond 1.5 sigma count less; 96 % efficient on normal noise
constexpr int kIterations = 6;

}  // namespace

double ShapeEstimator::Group::information(double reference) const {
  double weight = 0.0;
  double mean = 0.0;
  double square = 0.0;
  for (const Cell& cell : cells) {
    const auto count = static_cast<double>(cell.log_seconds.size());
    const double x = static_cast<double>(cell.items) / reference;
    weight += count;
    mean += count * x;
    square += count * x * x;
  }
  return weight > 0.0 ? square - mean * mean / weight : 0.0;
}

void ShapeEstimator::set_reference(double items) {
  shape_.reference_items = items;
  has_reference_ = true;
}

void ShapeEstimator::add(std::size_t index, std::int64_t step, std::int64_t items, double seconds) {
  if (proportional_) return;
  Member& member = members_[index];
  if (!member.open.cells.empty() && step - member.open.first_step >= kStepsPerGroup) close(member);
  Group& group = member.open;
  if (group.cells.empty()) group.first_step = step;
  auto cell = std::find_if(group.cells.begin(), group.cells.end(), [&](const Cell& c) { return c.items == items; });
  if (cell == group.cells.end()) {
    if (group.cells.size() == kCellsPerGroup) return;
    group.cells.push_back({items, {}, {}});
    cell = group.cells.end() - 1;
  }
  if (cell->log_seconds.size() == kSamplesPerCell) return;
  cell->log_seconds.push_back(std::log(seconds));
  cell->weights.push_back(1.0);
  stale_ = stale_ || group.cells.size() > 1;
}

void ShapeEstimator::restart(std::size_t member) { close(members_[member]); }

void ShapeEstimator::close(Member& member) {
  Group group = std::exchange(member.open, {});
  if (group.cells.size() < 2) return;
  member.closed.push_back(std::move(group));
  if (member.closed.size() <= kClosedGroups) return;
  const auto poorest =
      std::min_element(member.closed.begin(), member.closed.end(), [&](const Group& a, const Group& b) {
        return a.information(shape_.reference_items) < b.information(shape_.reference_items);
      });
  member.closed.erase(poorest);
}

ShapeEstimator::Sums ShapeEstimator::accumulate(Group& group, double noise, bool first) const {
  double weight = 0.0;
  double level = 0.0;
  double slope = 0.0;
  std::vector<double> residuals;
  for (const Cell& cell : group.cells) {
    const auto items = static_cast<double>(cell.items);
    const double log_shape = std::log(shape_.at(items));
    const double sensitivity = shape_.sensitivity(items);
    for (std::size_t j = 0; j < cell.log_seconds.size(); ++j) {
      const double residual = cell.log_seconds[j] - log_shape;
      if (first) residuals.push_back(residual);
      weight += cell.weights[j];
      level += cell.weights[j] * residual;
      slope += cell.weights[j] * sensitivity;
    }
  }
  // The first level is a median, so that a wild sample does not set it.
  level = first ? median(residuals) : level / weight;
  slope /= weight;
  Sums sums;
  sums.freedom = -1.0;  // the level
  for (Cell& cell : group.cells) {
    const auto items = static_cast<double>(cell.items);
    const double log_shape = std::log(shape_.at(items));
    const double contrast = shape_.sensitivity(items) - slope;
    for (std::size_t j = 0; j < cell.log_seconds.size(); ++j) {
      const double residual = cell.log_seconds[j] - log_shape - level;
      const double size = std::abs(residual);
      cell.weights[j] = size <= kHuber * noise ? 1.0 : kHuber * noise / size;
      sums.information += cell.weights[j] * contrast * contrast;
      sums.gradient += cell.weights[j] * contrast * residual;
      sums.misfit += cell.weights[j] * residual * residual;
      sums.freedom += 1.0;
    }
  }
  return sums;
}

void ShapeEstimator::fit(double noise) {
  if (!stale_) return;
  stale_ = false;
  const double prior = noise * noise / (kPriorError * kPriorError);
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    Sums total{prior, prior * (kPriorFraction - shape_.fixed_fraction), 0.0, 0.0};
    for (Member& member : members_) {
      const auto add = [&](Group& group) {
        if (group.cells.size() < 2) return;
        const Sums sums = accumulate(group, noise, iteration == 0);
        total.information += sums.information;
        total.gradient += sums.gradient;
        total.misfit += sums.misfit;
        total.freedom += sums.freedom;
      };
      for (Group& group : member.closed) add(group);
      add(member.open);
    }
    const double step = total.gradient / total.information;
    shape_.fixed_fraction = std::clamp(shape_.fixed_fraction + step, 0.0, kLargestFraction);
    // Samples may contradict each other (a slow first step, a curve that is no line). An error from the noise alone
    // would then be too small.
    const double spread = total.freedom > 0.0 ? std::sqrt(total.misfit / total.freedom) : noise;
    error_ = std::max(noise, spread) / std::sqrt(total.information);
    if (std::abs(step) < 1e-4) break;
  }
}

double ShapeEstimator::ratio_error(double from, double to) const {
  return error_ * std::abs(shape_.sensitivity(to) - shape_.sensitivity(from));
}

}  // namespace paceline::balance

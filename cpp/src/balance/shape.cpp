// SPDX-License-Identifier: Apache-2.0
#include "balance/shape.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kSamplesPerCell = 16;  // more samples add little
constexpr std::size_t kCellsPerGroup = 6;    // sizes come from a small set: planned chunk, corrections of floor * 2^k
constexpr std::size_t kClosedGroups = 4;
constexpr std::int64_t kStepsPerGroup = 48;  // long against noise, short against heating up
constexpr double kHintError = 0.1;           // weak, so that two steps of other sizes outweigh a hint that is wrong
constexpr double kLargestFraction = 0.98;    // with a slope of zero a device could take any number of items
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
  if (!hinted_items_ || proportional_) return;
  const double whole = *hinted_items_ + items;
  shape_.fixed_fraction = std::isfinite(whole) ? std::min(*hinted_items_ / whole, kLargestFraction) : kLargestFraction;
  prior_fraction_ = shape_.fixed_fraction;
  prior_error_ = error_ = kHintError;
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
    group.cells.push_back({.items = items});
    cell = group.cells.end() - 1;
  }
  if (cell->log_seconds.size() == kSamplesPerCell) return;
  cell->log_seconds.push_back(std::log(seconds));
  cell->middle = plan::median(cell->log_seconds);
  stale_ = stale_ || group.cells.size() > 1;
}

void ShapeEstimator::restart(std::size_t member) { close(members_[member]); }

void ShapeEstimator::close(Member& member) {
  Group group = std::exchange(member.open, {});
  if (group.cells.size() < 2) return;
  member.closed.push_back(std::move(group));
  if (member.closed.size() <= kClosedGroups) return;
  const auto poorest = std::ranges::min_element(
      member.closed, {}, [&](const Group& one) { return one.information(shape_.reference_items); });
  member.closed.erase(poorest);
}

ShapeEstimator::Sums ShapeEstimator::accumulate(const Group& group) const {
  struct Point {
    double weight;
    double residual;
    double sensitivity;
  };
  std::vector<Point> points;
  double weight = 0.0;
  double level = 0.0;
  double slope = 0.0;
  for (const Cell& cell : group.cells) {
    const auto count = static_cast<double>(cell.log_seconds.size());
    const auto items = static_cast<double>(cell.items);
    points.push_back({count, cell.middle - std::log(shape_.at(items)), shape_.sensitivity(items)});
    weight += count;
    level += count * points.back().residual;
    slope += count * points.back().sensitivity;
  }
  Sums sums;
  for (const Point& point : points) {
    const double contrast = point.sensitivity - slope / weight;
    sums.information += point.weight * contrast * contrast;
    sums.gradient += point.weight * contrast * (point.residual - level / weight);
  }
  return sums;
}

void ShapeEstimator::fit(double noise) {
  if (!stale_) return;
  stale_ = false;
  const double prior = noise * noise / (prior_error_ * prior_error_);
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    Sums total{prior, prior * (prior_fraction_ - shape_.fixed_fraction)};
    const auto add = [&](const Group& group) {
      if (group.cells.size() < 2) return;
      const Sums sums = accumulate(group);
      total.information += sums.information;
      total.gradient += sums.gradient;
    };
    for (const Member& member : members_) {
      std::ranges::for_each(member.closed, add);
      add(member.open);
    }
    const double step = total.gradient / total.information;
    shape_.fixed_fraction = std::clamp(shape_.fixed_fraction + step, 0.0, kLargestFraction);
    error_ = noise / std::sqrt(total.information);
    if (std::abs(step) < 1e-4) break;
  }
}

double ShapeEstimator::ratio_error(double from, double to) const {
  return error_ * std::abs(shape_.sensitivity(to) - shape_.sensitivity(from));
}

}  // namespace paceline::balance

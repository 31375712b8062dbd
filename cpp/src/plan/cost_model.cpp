// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include <paceline/error.hpp>
#include <paceline/plan/cost_model.hpp>

#include "monotone.hpp"

namespace paceline::plan {
namespace {

struct Segment {
  CostPoint from;
  CostPoint to;

  [[nodiscard]] double slope() const {
    return (to.seconds - from.seconds) / static_cast<double>(to.items - from.items);
  }

  // Never above `to` before it: rounding of the product must not make the table decrease at the joint.
  [[nodiscard]] double seconds(std::int64_t items) const {
    if (items < from.items) return std::max(0.0, from.seconds - slope() * static_cast<double>(from.items - items));
    if (items >= to.items) return to.seconds + slope() * static_cast<double>(items - to.items);
    return std::min(to.seconds, from.seconds + slope() * static_cast<double>(items - from.items));
  }

  [[nodiscard]] std::int64_t guess_items(double seconds, std::int64_t limit) const {
    const double items = static_cast<double>(from.items) + (seconds - from.seconds) / slope();
    return detail::to_count(items, limit);
  }
};

// The segment that ends at or before `after`, the iterator past the last point that is not beyond what is asked.
Segment segment_before(const std::vector<CostPoint>& points, std::vector<CostPoint>::const_iterator after) {
  if (points.size() == 1) return {{0, 0.0}, points.front()};
  const auto to = std::clamp(after, points.begin() + 1, points.end() - 1);
  return {*std::prev(to), *to};
}

void require_cost(double value, const char* what) {
  if (!std::isfinite(value) || value < 0.0) {
    throw InvalidArgument(fmt::format("{} is {}; a cost in seconds must be finite and not negative", what, value));
  }
}

}  // namespace

CostModel CostModel::affine(double fixed_seconds, double per_item_seconds) {
  require_cost(fixed_seconds, "fixed_seconds");
  require_cost(per_item_seconds, "per_item_seconds");
  CostModel model;
  model.fixed_seconds_ = fixed_seconds;
  model.per_item_seconds_ = per_item_seconds;
  return model;
}

CostModel CostModel::table(std::span<const CostPoint> points) {
  if (points.empty()) throw InvalidArgument("a cost table needs at least one point (items, seconds)");
  for (std::size_t i = 0; i < points.size(); ++i) {
    const CostPoint& point = points[i];
    require_cost(point.seconds, fmt::format("seconds of point {} ({} items)", i, point.items).c_str());
    if (point.items < 0)
      throw InvalidArgument(fmt::format("point {} has {} items; items cannot be negative", i, point.items));
    if (i == 0) continue;
    const CostPoint& before = points[i - 1];
    if (point.items <= before.items) {
      throw InvalidArgument(
          fmt::format("point {} has {} items after {}; a cost table must be in strictly increasing items", i,
                      point.items, before.items));
    }
    if (point.seconds < before.seconds) {
      throw InvalidArgument(fmt::format(
          "point {} ({} items) takes {} s, less than the {} s of {} items; more items cannot cost less: smooth the "
          "measurements first (isotonic regression, or a running maximum)",
          i, point.items, point.seconds, before.seconds, before.items));
    }
  }
  if (points.size() == 1 && points[0].items == 0) {
    throw InvalidArgument(
        "a cost table of one point means proportional and needs more than 0 items; use affine(seconds, 0)");
  }
  CostModel model;
  model.points_.assign(points.begin(), points.end());
  const Segment whole = points.size() == 1 ? Segment{{0, 0.0}, points[0]} : Segment{points.front(), points.back()};
  model.per_item_seconds_ = whole.slope();
  model.fixed_seconds_ = model.seconds(0);
  return model;
}

double CostModel::seconds(std::int64_t items) const noexcept {
  if (points_.empty()) return fixed_seconds_ + per_item_seconds_ * static_cast<double>(items);
  const auto after = std::upper_bound(points_.begin(), points_.end(), items,
                                      [](std::int64_t value, const CostPoint& point) { return value < point.items; });
  return segment_before(points_, after).seconds(items);
}

std::int64_t CostModel::items_within(double budget_seconds, std::int64_t limit) const noexcept {
  if (limit < 0 || !(seconds(0) <= budget_seconds)) return -1;
  if (seconds(limit) <= budget_seconds) return limit;
  std::int64_t guess = 0;
  if (points_.empty()) {
    guess = detail::to_count((budget_seconds - fixed_seconds_) / per_item_seconds_, limit);
  } else {
    const auto after = std::upper_bound(points_.begin(), points_.end(), budget_seconds,
                                        [](double value, const CostPoint& point) { return value < point.seconds; });
    guess = segment_before(points_, after).guess_items(budget_seconds, limit);
  }
  return detail::last_that_fits(0, limit, guess, [&](std::int64_t items) { return seconds(items) <= budget_seconds; });
}

CostModel CostModel::scaled(double factor) const {
  if (!std::isfinite(factor) || factor < 0.0) {
    throw InvalidArgument(
        fmt::format("factor is {}; a model can be scaled by a finite factor that is not negative", factor));
  }
  if (points_.empty()) return affine(fixed_seconds_ * factor, per_item_seconds_ * factor);
  std::vector<CostPoint> points = points_;
  for (CostPoint& point : points) point.seconds *= factor;
  return table(points);
}

}  // namespace paceline::plan

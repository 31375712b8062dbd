// SPDX-License-Identifier: Apache-2.0
#include "balance/clusters.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paceline::balance {
namespace {

constexpr double kEqual = 0.01;       // a smaller difference is worth nothing in a split
constexpr double kEqualErrors = 3.0;  // of eight equal devices some differ by 2 standard errors nearly always
constexpr double kEqualAgainErrors = 2.0;

/// The difference of two scales in units of the largest difference that may be chance. Below 1 they count as equal.
///
/// The error is that of one device of each group, not of the groups' means. Groups that were formed by nearness differ
/// by much more than the errors of their means, even if all devices are equal (eight equal devices fell into two groups
/// in every third run).
double distance(const Cluster& a, const Cluster& b, const ShapeEstimator& shape) {
  const double unknown = shape.ratio_error(a.centre_items, b.centre_items);
  const double of_one = a.error * a.error * static_cast<double>(a.members.size()) +
                        b.error * b.error * static_cast<double>(b.members.size());
  const double error = std::sqrt(of_one + unknown * unknown);
  const bool apart = a.before && b.before && *a.before != *b.before;
  return std::abs(a.log_scale - b.log_scale) / std::max(kEqual, (apart ? kEqualAgainErrors : kEqualErrors) * error);
}

Cluster merge(const Cluster& a, const Cluster& b) {
  const double wa = 1.0 / (a.error * a.error);
  const double wb = 1.0 / (b.error * b.error);
  Cluster both;
  both.members = a.members;
  both.members.insert(both.members.end(), b.members.begin(), b.members.end());
  both.log_scale = (wa * a.log_scale + wb * b.log_scale) / (wa + wb);
  both.scale = std::exp(both.log_scale);
  both.error = 1.0 / std::sqrt(wa + wb);
  both.centre_items = (wa * a.centre_items + wb * b.centre_items) / (wa + wb);
  if (a.before == b.before) both.before = a.before;
  return both;
}

/// A group's nearest one among those after it; the last group has none.
struct Nearest {
  std::size_t index = 0;
  double distance = std::numeric_limits<double>::infinity();
};

Nearest nearest_after(std::size_t i, const std::vector<Cluster>& clusters, const ShapeEstimator& shape) {
  Nearest nearest;
  for (std::size_t j = i + 1; j < clusters.size(); ++j) {
    const double d = distance(clusters[i], clusters[j], shape);
    if (d < nearest.distance) nearest = {j, d};
  }
  return nearest;
}

}  // namespace

std::vector<Cluster> cluster_equals(const std::vector<Measured>& devices, const ShapeEstimator& shape) {
  std::vector<Cluster> clusters;
  for (const Measured& device : devices) {
    clusters.push_back(
        {{device.device}, device.scale, std::log(device.scale), device.error, device.centre_items, device.before});
  }
  std::vector<Nearest> nearest;
  for (std::size_t i = 0; i < clusters.size(); ++i) nearest.push_back(nearest_after(i, clusters, shape));
  while (clusters.size() > 1) {
    const auto closest = std::min_element(nearest.begin(), nearest.end(),
                                          [](const Nearest& a, const Nearest& b) { return a.distance < b.distance; });
    if (closest->distance >= 1.0) break;
    const auto first = static_cast<std::size_t>(closest - nearest.begin());
    const std::size_t second = closest->index;
    clusters[first] = merge(clusters[first], clusters[second]);
    clusters.erase(clusters.begin() + static_cast<std::ptrdiff_t>(second));
    nearest.erase(nearest.begin() + static_cast<std::ptrdiff_t>(second));
    for (std::size_t i = 0; i < second; ++i) {
      const bool lost = i == first || nearest[i].index == first || nearest[i].index == second;
      if (lost) {
        nearest[i] = nearest_after(i, clusters, shape);
        continue;
      }
      if (nearest[i].index > second) --nearest[i].index;
      if (i > first) continue;
      const double d = distance(clusters[i], clusters[first], shape);
      if (d < nearest[i].distance || (d == nearest[i].distance && first < nearest[i].index)) nearest[i] = {first, d};
    }
    for (std::size_t i = second; i + 1 < nearest.size(); ++i) --nearest[i].index;
  }
  return clusters;
}

}  // namespace paceline::balance

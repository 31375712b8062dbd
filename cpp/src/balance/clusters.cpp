// SPDX-License-Identifier: Apache-2.0
#include "balance/clusters.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

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

}  // namespace

std::vector<Cluster> cluster_equals(const std::vector<Measured>& devices, const ShapeEstimator& shape) {
  std::vector<Cluster> clusters;
  for (const Measured& device : devices) {
    clusters.push_back(
        {{device.device}, device.scale, std::log(device.scale), device.error, device.centre_items, device.before});
  }
  std::ranges::stable_sort(clusters, {}, &Cluster::log_scale);
  // Neighbours in scale first; then those with one, two, ... other groups between them.
  for (std::size_t reach = 1; reach < clusters.size();) {
    std::size_t closest = clusters.size();
    double least = 1.0;
    for (std::size_t i = 0; i + reach < clusters.size(); ++i) {
      const double apart = distance(clusters[i], clusters[i + reach], shape);
      if (apart < least) std::tie(least, closest) = std::pair(apart, i);
    }
    if (closest == clusters.size()) {
      ++reach;
      continue;
    }
    clusters[closest] = merge(clusters[closest], clusters[closest + reach]);
    clusters.erase(clusters.begin() + static_cast<std::ptrdiff_t>(closest + reach));
    std::ranges::stable_sort(clusters, {}, &Cluster::log_scale);
    reach = 1;
  }
  return clusters;
}

}  // namespace paceline::balance

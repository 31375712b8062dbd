// SPDX-License-Identifier: Apache-2.0
#include "balance/clusters.hpp"

#include <algorithm>
#include <cmath>

namespace paceline::balance {
namespace {

constexpr double kEqual = 0.01;       // a difference that is worth nothing in a split
constexpr double kEqualErrors = 3.0;  // of eight equal devices some differ by 2 standard errors nearly always

/// Difference of two scales in units of what may be chance: below 1 they are equal.
///
/// The error is that of one device of each, not of the groups' means: groups formed by nearness differ by much more
/// than their means' errors even when all devices are equal (observed: eight equal ones fell into two groups on every
/// third run).
double distance(const Cluster& a, const Cluster& b, const ShapeEstimator& shape) {
  const double unknown = shape.ratio_error(a.centre_items, b.centre_items);
  const double of_one = a.error * a.error * static_cast<double>(a.members.size()) +
                        b.error * b.error * static_cast<double>(b.members.size());
  const double error = std::sqrt(of_one + unknown * unknown);
  return std::abs(std::log(a.scale / b.scale)) / std::max(kEqual, kEqualErrors * error);
}

Cluster merge(const Cluster& a, const Cluster& b) {
  const double wa = 1.0 / (a.error * a.error);
  const double wb = 1.0 / (b.error * b.error);
  Cluster both;
  both.members = a.members;
  both.members.insert(both.members.end(), b.members.begin(), b.members.end());
  both.scale = std::exp((wa * std::log(a.scale) + wb * std::log(b.scale)) / (wa + wb));
  both.error = 1.0 / std::sqrt(wa + wb);
  both.centre_items = (wa * a.centre_items + wb * b.centre_items) / (wa + wb);
  return both;
}

}  // namespace

std::vector<Cluster> cluster_equals(const std::vector<Measured>& devices, const ShapeEstimator& shape) {
  std::vector<Cluster> clusters;
  for (const Measured& device : devices) {
    clusters.push_back({{device.device}, device.scale, device.error, device.centre_items});
  }
  while (clusters.size() > 1) {
    std::size_t first = 0;
    std::size_t second = 0;
    double least = 1.0;
    for (std::size_t i = 0; i + 1 < clusters.size(); ++i) {
      for (std::size_t j = i + 1; j < clusters.size(); ++j) {
        const double d = distance(clusters[i], clusters[j], shape);
        if (d >= least) continue;
        least = d;
        first = i;
        second = j;
      }
    }
    if (second == 0) break;
    clusters[first] = merge(clusters[first], clusters[second]);
    clusters.erase(clusters.begin() + static_cast<std::ptrdiff_t>(second));
  }
  return clusters;
}

}  // namespace paceline::balance

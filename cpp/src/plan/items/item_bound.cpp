// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "plan/items/item_problem.hpp"

namespace paceline::plan {
namespace {

/// Compares what devices can do by `time` with what there is to do. If false, no split is done by then. `sums`: of the
/// j largest costs.
bool suffices(const ItemProblem& problem, const std::vector<double>& sums, double time) {
  std::vector<double> capacity;
  for (const LoadModel& model : problem.models) {
    const double left = time - model.fixed_seconds;
    const double done = left < 0.0 ? 0.0 : model.seconds_per_cost > 0.0 ? left / model.seconds_per_cost : sums.back();
    capacity.push_back(std::min(done, sums.back()));
  }
  std::ranges::sort(capacity, std::greater<>());
  // The j costliest items lie on at most j devices, and all items on all devices.
  const std::size_t items = problem.items();
  double sum = 0.0;
  for (std::size_t j = 1; j <= capacity.size(); ++j) {
    sum += capacity[j - 1];
    if (sum * kRounding < sums[j == capacity.size() ? items : std::min(j, items)]) return false;
  }
  // The j costliest items cost at least `least` each, so the devices must have room for j items of this cost. With j
  // one more than the devices, two items share a device; with j one more than twice as many, three do.
  for (std::size_t j = capacity.size() + 1; j <= std::min(items, 2 * capacity.size() + 1); j += capacity.size()) {
    const double least = problem.cost[j - 1];
    if (!(least > 0.0)) break;
    double fit = 0.0;
    for (const double done : capacity) fit += std::floor(done / least * kRounding);
    if (fit < static_cast<double>(j)) return false;
  }
  return true;
}

}  // namespace

double lower_bound_of(const ItemProblem& problem) {
  if (problem.items() == 0) return 0.0;
  std::vector<double> sums{0.0};
  for (const double cost : problem.cost) sums.push_back(sums.back() + cost);
  double low = std::numeric_limits<double>::infinity();  // whoever has the costliest item
  double high = low;                                     // one device has all
  for (const LoadModel& model : problem.models) {
    low = std::min(low, model.seconds(problem.cost.front()));
    high = std::min(high, model.seconds(sums.back()));
  }
  if (suffices(problem, sums, low)) return low;
  while (high - low > 1e-13 * high) {
    const double middle = low + (high - low) / 2.0;
    if (middle <= low || middle >= high) break;
    (suffices(problem, sums, middle) ? high : low) = middle;
  }
  return low;
}

}  // namespace paceline::plan

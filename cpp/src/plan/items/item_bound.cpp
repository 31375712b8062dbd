// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "plan/items/item_problem.hpp"

namespace paceline::plan {
namespace {

// The bound may be too low by this part, never too high. Sums are rounded, and that must not lower a count by one.
constexpr double kRounding = 1.0 + 1e-12;

/// Compares what devices can do by some time with what there is to do.
class Capacity {
 public:
  explicit Capacity(const ItemProblem& problem) : problem_(problem), capacity_(problem.devices()) {
    sums_.push_back(0.0);
    for (const double cost : problem.cost) sums_.push_back(sums_.back() + cost);
  }

  /// If false, no split is done by then.
  bool suffices(double time) {
    for (std::size_t device = 0; device < capacity_.size(); ++device) {
      const LoadModel& model = problem_.models[device];
      double done = 0.0;
      if (time >= model.fixed_seconds) {
        done = model.seconds_per_cost > 0.0 ? (time - model.fixed_seconds) / model.seconds_per_cost : sums_.back();
      }
      capacity_[device] = std::min(done, sums_.back());
    }
    std::sort(capacity_.begin(), capacity_.end(), std::greater<>());
    // The j costliest items lie on at most j devices, and all items on all devices.
    const std::size_t items = problem_.items();
    double sum = 0.0;
    for (std::size_t j = 1; j <= capacity_.size(); ++j) {
      sum += capacity_[j - 1];
      if (sum * kRounding < sums_[j == capacity_.size() ? items : std::min(j, items)]) return false;
    }
    // The j costliest items cost at least `least` each, so the devices must have room for j items of this cost. With j
    // one more than the devices, two items share a device; with j one more than twice as many, three do.
    for (std::size_t j = capacity_.size() + 1; j <= std::min(items, 2 * capacity_.size() + 1); j += capacity_.size()) {
      const double least = problem_.cost[j - 1];
      if (!(least > 0.0)) break;
      double fit = 0.0;
      for (const double done : capacity_) fit += std::floor(done / least * kRounding);
      if (fit < static_cast<double>(j)) return false;
    }
    return true;
  }

 private:
  const ItemProblem& problem_;
  std::vector<double> capacity_;
  std::vector<double> sums_;  // of the j largest costs
};

}  // namespace

double lower_bound_of(const ItemProblem& problem) {
  if (problem.items() == 0) return 0.0;
  Capacity capacity(problem);
  double low = std::numeric_limits<double>::infinity();  // whoever has the costliest item
  double high = low;                                     // one device has all
  double all = 0.0;
  for (const double cost : problem.cost) all += cost;
  for (const LoadModel& model : problem.models) {
    low = std::min(low, model.fixed_seconds + model.seconds_per_cost * problem.cost.front());
    high = std::min(high, model.fixed_seconds + model.seconds_per_cost * all);
  }
  if (capacity.suffices(low)) return low;
  while (high - low > 1e-13 * high) {
    const double middle = low + (high - low) / 2.0;
    if (middle <= low || middle >= high) break;
    (capacity.suffices(middle) ? high : low) = middle;
  }
  return low;
}

}  // namespace paceline::plan

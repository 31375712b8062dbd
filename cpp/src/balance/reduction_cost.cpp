// SPDX-License-Identifier: Apache-2.0
#include "balance/reduction_cost.hpp"

#include <algorithm>
#include <utility>

#include "balance/bounded.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kReductionsKept = 16;
constexpr std::size_t kLeastReductions = 2;  // the first reduction of a process allocates and connects
// Below it the search over numbers of devices costs more time than leaving a device out can save.
constexpr double kNegligibleReduction = 0.002;

}  // namespace

ReductionCost::ReductionCost(std::vector<double> given, std::size_t devices)
    : given_(std::move(given)), measured_(devices + 1), seconds_(given_) {}

void ReductionCost::record(std::size_t working, double seconds, double compute_seconds) {
  if (working == 0 || working >= measured_.size() || !(seconds > 0.0)) return;
  keep_last(measured_[working], seconds, kReductionsKept);
  estimate(compute_seconds);
}

void ReductionCost::estimate(double compute_seconds) {
  struct Known {
    std::size_t count = 0;
    double seconds = 0.0;
  };
  std::vector<Known> known;
  for (std::size_t k = 1; k < measured_.size(); ++k) {
    if (measured_[k].size() >= kLeastReductions) {
      known.push_back({k, plan::median(measured_[k])});
    } else if (!given_.empty()) {
      known.push_back({k, given_[k]});
    } else if (k == 1) {
      known.push_back({k, 0.0});
    }
  }
  seconds_.assign(measured_.size(), 0.0);
  for (std::size_t k = 1; k < seconds_.size(); ++k) {
    const auto next = std::ranges::find_if(known, [&](const Known& point) { return point.count >= k; });
    const auto to = next != known.end() ? next : known.end() - 1;
    // Known itself; or nothing is known but the cost of one device, which then stands for any number.
    if (to->count == k || to == known.begin()) {
      seconds_[k] = to->seconds;
      continue;
    }
    const Known from = *std::prev(to);
    const double slope = (to->seconds - from.seconds) / static_cast<double>(to->count - from.count);
    seconds_[k] = std::max(0.0, from.seconds + slope * (static_cast<double>(k) - static_cast<double>(from.count)));
  }
  const double most = *std::ranges::max_element(seconds_);
  if (given_.empty() && most < kNegligibleReduction * compute_seconds) seconds_.clear();
}

}  // namespace paceline::balance

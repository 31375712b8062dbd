// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "item_problem.hpp"

namespace paceline::plan::detail {
namespace {

// The largest power of two that every cost is a multiple of; 0 if all costs are 0. Loads are multiples of it, too:
// whole tokens on equal devices cannot be split more evenly than to one token.
double unit_of(const std::vector<double>& costs) {
  constexpr int kFractionBits = std::numeric_limits<double>::digits - 1;
  constexpr std::uint64_t kImplicit = std::uint64_t{1} << kFractionBits;
  int lowest = std::numeric_limits<int>::max();
  for (const double cost : costs) {
    if (!(cost > 0.0)) break;
    // Bits, not frexp: this runs over every item of every split.
    const auto bits = std::bit_cast<std::uint64_t>(cost);
    const auto exponent = static_cast<int>(bits >> kFractionBits);
    const std::uint64_t fraction = bits % kImplicit;
    lowest = std::min(lowest, std::max(exponent, 1) + std::countr_zero(exponent > 0 ? fraction | kImplicit : fraction));
  }
  if (lowest == std::numeric_limits<int>::max()) return 0.0;
  return std::ldexp(std::numeric_limits<double>::denorm_min(), lowest - 1);
}

// A bound may be too low by so much, never too high: sums are rounded, and a count must not fall by one for it.
constexpr double kRounding = 1.0 + 1e-12;

class Bound {
 public:
  explicit Bound(const ItemProblem& problem)
      : problem_(problem),
        unit_(unit_of(problem.cost)),
        capacity_(problem.devices()),
        descending_(problem.devices()),
        most_(problem.devices()) {
    sums_.reserve(problem.items() + 1);
    sums_.push_back(0.0);
    for (const double cost : problem.cost) sums_.push_back(sums_.back() + cost);
    for (std::size_t device = 0; device < problem.devices(); ++device) {
      const ItemCaps& cap = problem.caps[device];
      const auto count = std::min(cap.items, static_cast<std::int64_t>(problem.items()));
      // So many items cost no more than the costliest ones.
      most_[device] = std::min(cap.cost, sums_[static_cast<std::size_t>(count)]);
      const LoadModel& model = problem.models[device];
      last_ = std::max(last_, model.fixed_seconds + model.seconds_per_cost * most_[device]);
    }
  }

  double find() {
    double bound = 0.0;
    if (!holds_all(last_)) return std::numeric_limits<double>::infinity();
    if (!holds_all(bound)) bound = first_time(bound, [this](double time) { return holds_all(time); });
    if (!holds_largest(bound)) bound = first_time(bound, [this](double time) { return holds_largest(time); });
    // Of items that all have the same choice of devices only the costliest counts.
    const std::size_t singles = problem_.capped ? problem_.items() : 1;
    for (Rank rank = 0; rank < singles; ++rank) bound = std::max(bound, alone(rank));
    return bound;
  }

 private:
  void look_at(double time) {
    for (std::size_t device = 0; device < capacity_.size(); ++device) {
      const LoadModel& model = problem_.models[device];
      double done = 0.0;
      if (time >= model.fixed_seconds) {
        done = model.seconds_per_cost > 0.0 ? (time - model.fixed_seconds) / model.seconds_per_cost : most_[device];
      }
      done = std::min(done, most_[device]);
      // Beyond what a double counts there is nothing to round.
      if (unit_ > 0.0 && done * kRounding < unit_ * 0x1p52) done = std::floor(done / unit_ * kRounding) * unit_;
      capacity_[device] = done;
    }
  }

  bool holds_all(double time) {
    look_at(time);
    double sum = 0.0;
    for (const double done : capacity_) sum += done;
    return sum * kRounding >= sums_.back();
  }

  // The j costliest items lie on at most j devices, and on a device lie no more items of at least some cost than fit.
  bool holds_largest(double time) {
    look_at(time);
    descending_ = capacity_;
    std::sort(descending_.begin(), descending_.end(), std::greater<>());
    double sum = 0.0;
    for (std::size_t j = 1; j <= std::min(problem_.items(), descending_.size()); ++j) {
      sum += descending_[j - 1];
      if (sum * kRounding < sums_[j]) return false;
    }
    // Beyond two items a device the other bounds are as good.
    for (std::size_t j = 1; j <= std::min(problem_.items(), 2 * descending_.size() + 1); ++j) {
      const double least = problem_.cost[j - 1];
      if (!(least > 0.0)) break;
      double fit = 0.0;
      for (const double done : capacity_) fit += std::floor(done / least * kRounding);
      if (fit < static_cast<double>(j)) return false;
    }
    return true;
  }

  // The last time found at which `enough`, monotone in time, is still false; it is false at `low` and true at last_.
  template <class Enough>
  double first_time(double low, const Enough& enough) const {
    double high = last_;
    while (high - low > 1e-13 * high) {
      const double middle = low + (high - low) / 2.0;
      if (middle <= low || middle >= high) break;
      (enough(middle) ? high : low) = middle;
    }
    return low;
  }

  [[nodiscard]] double alone(Rank rank) const {
    double first = std::numeric_limits<double>::infinity();
    for (std::size_t device = 0; device < problem_.devices(); ++device) {
      if (!Holding{}.has_room(problem_, device, rank)) continue;
      const LoadModel& model = problem_.models[device];
      first = std::min(first, model.fixed_seconds + model.seconds_per_cost * problem_.cost[rank]);
    }
    return first;
  }

  const ItemProblem& problem_;
  double unit_;
  std::vector<double> capacity_;    // what each device has done by the time looked at
  std::vector<double> descending_;  // the same, sorted
  std::vector<double> most_;        // what each device may be given at all
  std::vector<double> sums_;        // of the j largest costs
  double last_ = 0.0;
};

}  // namespace

double lower_bound_of(const ItemProblem& problem) { return problem.items() == 0 ? 0.0 : Bound(problem).find(); }

}  // namespace paceline::plan::detail

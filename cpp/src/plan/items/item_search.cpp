// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <ranges>
#include <utility>
#include <vector>

#include "plan/items/item_problem.hpp"

namespace paceline::plan {
namespace {

// Half a millisecond. It is enough to prove the best split of 12 items, unless they are nearly equal and the devices
// many and unequal.
constexpr int kMostSearchSteps = 1 << 14;

class ItemSearch {
 public:
  ItemSearch(const ItemProblem& problem, double target, Holdings& best)
      : problem_(problem), target_(target), best_(best), now_(problem.devices()), rest_(problem.items() + 1) {
    for (std::size_t rank = problem.items(); rank-- > 0;) rest_[rank] = rest_[rank + 1] + problem.cost[rank];
    set_limits();
  }

  bool run() {
    descend(0);
    return steps_ <= kMostSearchSteps;
  }

 private:
  // The most that each device may hold to finish before the best makespan so far.
  void set_limits() {
    below_ = makespan_of(problem_, best_);
    limits_.clear();
    for (const LoadModel& model : problem_.models) {
      const double left = below_ - model.fixed_seconds;
      limits_.push_back(model.seconds_per_cost > 0.0 ? left / model.seconds_per_cost
                        : left > 0.0                 ? std::numeric_limits<double>::infinity()
                                                     : 0.0);
    }
  }

  [[nodiscard]] bool may_fit(Rank rank) const {
    double room = 0.0;
    for (std::size_t d = 0; d < now_.size(); ++d) room += std::max(0.0, limits_[d] - now_[d].cost);
    return room * kRounding >= rest_[rank];
  }

  // Of several equal devices one is tried.
  [[nodiscard]] bool has_twin_before(std::size_t device) const {
    const auto alike = [&](std::size_t d) {
      return now_[d].cost == now_[device].cost && now_[d].ranks.empty() == now_[device].ranks.empty() &&
             problem_.models[d] == problem_.models[device];
    };
    return std::ranges::any_of(std::views::iota(std::size_t{0}, device), alike);
  }

  // True: the search is over.
  bool descend(Rank rank) {
    if (rank == problem_.items()) {
      if (makespan_of(problem_, now_) < below_) {
        best_ = now_;
        set_limits();
      }
      return below_ <= target_;
    }
    if (!may_fit(rank)) return false;
    std::vector<std::pair<double, std::size_t>> places;  // by when they would finish it
    for (std::size_t d = 0; d < now_.size(); ++d) {
      const double finish = problem_.models[d].seconds(now_[d].cost + problem_.cost[rank]);
      if (finish < below_ && !has_twin_before(d)) places.emplace_back(finish, d);
    }
    std::sort(places.begin(), places.end());
    for (const auto& [finish, device] : places) {
      if (!(finish < below_)) break;
      if (++steps_ > kMostSearchSteps) return true;
      const double before = now_[device].cost;
      now_[device].append(problem_, rank);
      const bool over = descend(rank + 1);
      now_[device].ranks.pop_back();
      now_[device].cost = before;  // subtracting would add up rounding errors
      if (over) return true;
    }
    return false;
  }

  const ItemProblem& problem_;
  double target_;
  Holdings& best_;
  Holdings now_;
  std::vector<double> rest_;  // from each rank on, the sum of costs
  std::vector<double> limits_;
  double below_ = 0.0;
  int steps_ = 0;
};

}  // namespace

bool search_items(const ItemProblem& problem, double target, Holdings& holdings) {
  return ItemSearch(problem, target, holdings).run();
}

}  // namespace paceline::plan

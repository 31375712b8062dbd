// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "item_problem.hpp"

namespace paceline::plan::detail {
namespace {

constexpr double kRounding = 1.0 + 1e-12;

struct Place {
  LoadModel model;
  ItemCaps cap;
  double cost = 0.0;
  double memory = 0.0;
  std::int64_t items = 0;
  double limit = 0.0;  // the most it may cost and still finish before what was found

  [[nodiscard]] double finish_with(double more) const {
    return model.fixed_seconds + model.seconds_per_cost * (cost + more);
  }
  [[nodiscard]] double finish() const { return items == 0 ? 0.0 : finish_with(0.0); }
  [[nodiscard]] bool same_as(const Place& other) const {
    return cost == other.cost && memory == other.memory && items == other.items && model == other.model &&
           cap == other.cap;
  }
};

class Tree {
 public:
  Tree(const ItemProblem& problem, const TreeSearch& search)
      : problem_(problem), search_(search), best_(search.below), now_(search.ranks.size()) {
    for (const std::size_t device : search.devices)
      places_.push_back({.model = problem.models[device], .cap = problem.caps[device]});
    rest_cost_.resize(search.ranks.size() + 1);
    rest_memory_.resize(search.ranks.size() + 1);
    for (std::size_t at = search.ranks.size(); at-- > 0;) {
      rest_cost_[at] = rest_cost_[at + 1] + problem.cost[search.ranks[at]];
      rest_memory_[at] = rest_memory_[at + 1] + problem.memory_of(search.ranks[at]);
    }
    set_limits();
  }

  TreeResult run() {
    descend(0);
    result_.complete = !cut_off_;
    return std::move(result_);
  }

 private:
  void set_limits() {
    for (Place& place : places_) {
      const LoadModel& model = place.model;
      double limit = best_ > model.fixed_seconds ? std::numeric_limits<double>::infinity() : 0.0;
      if (model.seconds_per_cost > 0.0) limit = std::max(0.0, (best_ - model.fixed_seconds) / model.seconds_per_cost);
      place.limit = std::min(limit, place.cap.cost);
    }
  }

  // Whether the items from `at` on have room in sum, and hence perhaps one by one.
  [[nodiscard]] bool may_fit(std::size_t at) const {
    double room = 0.0;
    for (const Place& place : places_) room += std::max(0.0, place.limit - place.cost);
    if (room * kRounding < rest_cost_[at]) return false;
    if (!problem_.capped) return true;
    double memory = 0.0;
    double items = 0.0;
    for (const Place& place : places_) {
      memory += std::max(0.0, place.cap.memory - place.memory);
      items += static_cast<double>(place.cap.items) - static_cast<double>(place.items);
    }
    return memory * kRounding >= rest_memory_[at] && items >= static_cast<double>(search_.ranks.size() - at);
  }

  // The place after the last one tried in the order of (finish with the item, position); places_.size() if none.
  [[nodiscard]] std::size_t next_place(Rank rank, double cost, double& finish, std::size_t last) const {
    std::size_t next = places_.size();
    double first = best_;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const double with = places_[i].finish_with(cost);
      const bool tried = last < places_.size() && (with < finish || (with == finish && i <= last));
      if (tried || !(with < first) || !has_room(places_[i], rank)) continue;
      first = with;
      next = i;
    }
    finish = first;
    return next;
  }

  [[nodiscard]] bool has_room(const Place& place, Rank rank) const {
    return !problem_.capped || (place.items < place.cap.items && place.cost + problem_.cost[rank] <= place.cap.cost &&
                                place.memory + problem_.memory_of(rank) <= place.cap.memory);
  }

  // One of several places that are alike is enough.
  [[nodiscard]] bool has_twin_before(std::size_t i) const {
    return std::any_of(places_.begin(), places_.begin() + static_cast<std::ptrdiff_t>(i),
                       [&](const Place& other) { return other.same_as(places_[i]); });
  }

  void keep() {
    double latest = 0.0;
    for (const Place& place : places_) latest = std::max(latest, place.finish());
    if (!(latest < best_)) return;
    best_ = latest;
    result_.found = true;
    result_.place = now_;
    set_limits();
  }

  // True: the search is over.
  bool descend(std::size_t at) {
    if (at == search_.ranks.size()) {
      keep();
      return result_.found && best_ <= search_.target;
    }
    if (!may_fit(at)) return false;
    const Rank rank = search_.ranks[at];
    const double cost = problem_.cost[rank];
    double finish = 0.0;
    std::size_t last = places_.size();
    while ((last = next_place(rank, cost, finish, last)) < places_.size()) {
      if (has_twin_before(last)) continue;
      if (++result_.steps > search_.steps) {
        cut_off_ = true;
        return true;
      }
      Place& place = places_[last];
      const Place before = place;
      place.cost += cost;
      place.memory += problem_.memory_of(rank);
      ++place.items;
      now_[at] = last;
      const bool over = descend(at + 1);
      // Put back, not subtracted: rounding would add up. The limit may have been lowered meanwhile.
      place.cost = before.cost;
      place.memory = before.memory;
      place.items = before.items;
      if (over) return true;
    }
    return false;
  }

  const ItemProblem& problem_;
  const TreeSearch& search_;
  double best_;
  std::vector<std::size_t> now_;
  std::vector<Place> places_;
  std::vector<double> rest_cost_;
  std::vector<double> rest_memory_;
  bool cut_off_ = false;
  TreeResult result_;
};

}  // namespace

TreeResult search_tree(const ItemProblem& problem, const TreeSearch& search) { return Tree(problem, search).run(); }

void apply(const ItemProblem& problem, const TreeSearch& search, const TreeResult& result, Holdings& holdings) {
  holdings.resize(problem.devices());
  for (const std::size_t device : search.devices) holdings[device] = {};
  for (std::size_t i = 0; i < search.ranks.size(); ++i) {
    holdings[search.devices[result.place[i]]].append(problem, search.ranks[i]);
  }
}

}  // namespace paceline::plan::detail

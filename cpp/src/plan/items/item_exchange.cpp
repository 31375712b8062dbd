// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "plan/items/item_problem.hpp"

namespace paceline::plan {
namespace {

constexpr Rank kNothing = ~Rank{0};

struct Exchange {
  std::size_t to = 0;
  Rank out = kNothing;
  Rank in = kNothing;  // kNothing: a move
  double latest = 0.0;
};

// The best exchange of the latest device with another one. Candidates are all moves, and for each item the swap whose
// difference in cost is nearest to what lets the two devices finish together. Both lists descend in cost, so one pass
// finds the nearest partner of every item.
class Exchanges {
 public:
  Exchanges(const ItemProblem& problem, const Holdings& holdings, std::size_t from)
      : problem_(problem), holdings_(holdings), from_(from), finish_(finish_of(problem, holdings, from)) {
    best_.latest = finish_;
  }

  const Exchange& find() {
    const auto [earliest, next_latest] = others();
    if (earliest == from_) return best_;  // the only device
    look_at(earliest);
    // The makespan cannot fall below the finish of the next device. With many items per device one partner is enough.
    if (best_.latest <= next_latest) return best_;
    for (std::size_t to = 0; to < problem_.devices(); ++to) {
      if (to != from_ && to != earliest) look_at(to);
    }
    return best_;
  }

 private:
  // The device that is free first, and the latest finish of all devices but `from`.
  [[nodiscard]] std::pair<std::size_t, double> others() const {
    std::size_t earliest = from_;
    double first = 0.0;
    double last = 0.0;
    for (std::size_t device = 0; device < problem_.devices(); ++device) {
      if (device == from_) continue;
      const LoadModel& model = problem_.models[device];
      const double free = model.fixed_seconds + model.seconds_per_cost * holdings_[device].cost;
      last = std::max(last, finish_of(problem_, holdings_, device));
      if (earliest != from_ && free >= first) continue;
      earliest = device;
      first = free;
    }
    return {earliest, last};
  }

  void look_at(std::size_t to) {
    const LoadModel& here = problem_.models[from_];
    const LoadModel& there = problem_.models[to];
    to_ = to;
    to_finish_ = there.fixed_seconds + there.seconds_per_cost * holdings_[to].cost;
    if (!(to_finish_ < best_.latest)) return;
    const double rates = here.seconds_per_cost + there.seconds_per_cost;
    const double wanted = rates > 0.0 ? (finish_ - to_finish_) / rates : 0.0;
    const std::vector<Rank>& partners = holdings_[to].ranks;
    std::size_t near = 0;
    for (const Rank out : holdings_[from_].ranks) {
      const double cost = problem_.cost[out];
      consider(out, kNothing, cost);
      while (near < partners.size() && problem_.cost[partners[near]] > cost - wanted) ++near;
      const std::size_t end = std::min(near + 1, partners.size());
      for (std::size_t i = near - std::min<std::size_t>(near, 1); i < end; ++i) {
        consider(out, partners[i], cost - problem_.cost[partners[i]]);
      }
    }
  }

  void consider(Rank out, Rank in, double shifted) {
    const LoadModel& here = problem_.models[from_];
    const bool leaves_none = in == kNothing && holdings_[from_].ranks.size() == 1;
    const double left = leaves_none ? 0.0 : finish_ - here.seconds_per_cost * shifted;
    const double latest = std::max(left, to_finish_ + problem_.models[to_].seconds_per_cost * shifted);
    if (latest < best_.latest) best_ = {to_, out, in, latest};
  }

  const ItemProblem& problem_;
  const Holdings& holdings_;
  std::size_t from_;
  double finish_;
  std::size_t to_ = 0;
  double to_finish_ = 0.0;
  Exchange best_;
};

void give(const ItemProblem& problem, Rank rank, Holding& from, Holding& to) {
  from.ranks.erase(std::lower_bound(from.ranks.begin(), from.ranks.end(), rank));
  to.ranks.insert(std::lower_bound(to.ranks.begin(), to.ranks.end(), rank), rank);
  from.cost -= problem.cost[rank];
  to.cost += problem.cost[rank];
}

}  // namespace

void exchange_items(const ItemProblem& problem, double target, Holdings& holdings) {
  // Each round lowers the makespan or the number of devices that have it, so the loop ends. The limit is for endless
  // gains of one rounding error.
  const std::size_t rounds = 64 + 8 * problem.devices() + problem.items();
  for (std::size_t round = 0; round < rounds; ++round) {
    const std::size_t from = latest_of(problem, holdings);
    const double latest = finish_of(problem, holdings, from);
    if (latest <= target) return;
    const Exchange best = Exchanges(problem, holdings, from).find();
    if (best.out == kNothing) return;
    give(problem, best.out, holdings[from], holdings[best.to]);
    if (best.in != kNothing) give(problem, best.in, holdings[best.to], holdings[from]);
  }
}

}  // namespace paceline::plan

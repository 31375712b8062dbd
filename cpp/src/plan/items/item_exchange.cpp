// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

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
Exchange best_exchange(const ItemProblem& problem, const Holdings& holdings, std::size_t from) {
  const std::vector<Rank>& mine = holdings[from].ranks;
  const double finish = finish_of(problem, holdings, from);
  const double rate = problem.models[from].seconds_per_cost;
  Exchange best{.latest = finish};

  const auto look_at = [&](std::size_t to) {
    const double to_finish = problem.models[to].seconds(holdings[to].cost);
    const double to_rate = problem.models[to].seconds_per_cost;
    if (!(to_finish < best.latest)) return;
    const auto consider = [&](Rank out, Rank in, double shifted) {
      const bool leaves_none = in == kNothing && mine.size() == 1;
      const double latest = std::max(leaves_none ? 0.0 : finish - rate * shifted, to_finish + to_rate * shifted);
      if (latest < best.latest) best = {to, out, in, latest};
    };
    const double wanted = rate + to_rate > 0.0 ? (finish - to_finish) / (rate + to_rate) : 0.0;
    const std::vector<Rank>& partners = holdings[to].ranks;
    std::size_t near = 0;
    for (const Rank out : mine) {
      const double cost = problem.cost[out];
      consider(out, kNothing, cost);
      while (near < partners.size() && problem.cost[partners[near]] > cost - wanted) ++near;
      const std::size_t end = std::min(near + 1, partners.size());
      for (std::size_t i = near - std::min<std::size_t>(near, 1); i < end; ++i) {
        consider(out, partners[i], cost - problem.cost[partners[i]]);
      }
    }
  };

  std::size_t earliest = from;  // of the other devices, the one that is free first
  double first = std::numeric_limits<double>::infinity();
  double next_latest = 0.0;
  for (std::size_t device = 0; device < problem.devices(); ++device) {
    if (device == from) continue;
    next_latest = std::max(next_latest, finish_of(problem, holdings, device));
    const double free = problem.models[device].seconds(holdings[device].cost);
    if (!(free < first)) continue;
    earliest = device;
    first = free;
  }
  if (earliest != from) look_at(earliest);
  // The makespan cannot fall below the finish of the next device. With many items per device one partner is enough.
  if (best.latest <= next_latest) return best;
  for (std::size_t to = 0; to < problem.devices(); ++to) {
    if (to != from && to != earliest) look_at(to);
  }
  return best;
}

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
    const Exchange best = best_exchange(problem, holdings, from);
    if (best.out == kNothing) return;
    give(problem, best.out, holdings[from], holdings[best.to]);
    if (best.in != kNothing) give(problem, best.in, holdings[best.to], holdings[from]);
  }
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <numeric>

#include "item_problem.hpp"

namespace paceline::plan::detail {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The largest part of a cap that it takes, over all sums that are capped: what is hard to place.
double tightness(double cost, double memory, const ItemCaps& cap) {
  double tight = 0.0;
  if (cap.cost < ItemCaps::kAnySum)
    tight = std::max(tight, cap.cost > 0.0 ? cost / cap.cost : (cost > 0.0 ? kNever : 0.0));
  if (cap.memory < ItemCaps::kAnySum) {
    tight = std::max(tight, cap.memory > 0.0 ? memory / cap.memory : (memory > 0.0 ? kNever : 0.0));
  }
  return tight;
}

ItemCaps widest(const ItemProblem& problem) {
  ItemCaps wide{.items = 0, .cost = 0.0, .memory = 0.0};
  for (const ItemCaps& cap : problem.caps) {
    wide.cost = std::max(wide.cost, cap.cost);
    wide.memory = std::max(wide.memory, cap.memory);
  }
  return wide;
}

enum class Fill { tightest, widest };

bool fill(const ItemProblem& problem, const std::vector<Rank>& ranks, Fill how, Holdings& holdings) {
  holdings.assign(problem.devices(), {});
  for (const Rank rank : ranks) {
    std::size_t chosen = problem.devices();
    double best = 0.0;
    for (std::size_t device = 0; device < problem.devices(); ++device) {
      const Holding& holding = holdings[device];
      if (!holding.has_room(problem, device, rank)) continue;
      const double tight =
          tightness(holding.cost + problem.cost[rank], holding.memory + problem.memory_of(rank), problem.caps[device]);
      if (chosen == problem.devices() || (how == Fill::tightest ? tight > best : tight < best)) {
        chosen = device;
        best = tight;
      }
    }
    if (chosen == problem.devices()) return false;
    holdings[chosen].append(problem, rank);
  }
  for (Holding& holding : holdings) std::sort(holding.ranks.begin(), holding.ranks.end());
  return true;
}

}  // namespace

bool assign_longest_first(const ItemProblem& problem, Holdings& holdings) {
  holdings.assign(problem.devices(), {});
  // An empty device's finish starts at its fixed cost: it is opened where even so it would be the first.
  std::vector<double> before(problem.devices());
  std::vector<double> rate(problem.devices());
  for (std::size_t device = 0; device < problem.devices(); ++device) {
    before[device] = problem.models[device].fixed_seconds;
    rate[device] = problem.models[device].seconds_per_cost;
    holdings[device].ranks.reserve(problem.items() / problem.devices() * 2);
  }
  for (Rank rank = 0; rank < problem.items(); ++rank) {
    const double cost = problem.cost[rank];
    std::size_t chosen = problem.devices();
    double first = kNever;
    for (std::size_t device = 0; device < problem.devices(); ++device) {
      const double finish = before[device] + rate[device] * cost;
      const bool better = finish < first && (!problem.capped || holdings[device].has_room(problem, device, rank));
      // Which device is first is as good as random: selected without a branch to mispredict.
      first = better ? finish : first;
      chosen = better ? device : chosen;
    }
    if (chosen == problem.devices()) return false;
    Holding& holding = holdings[chosen];
    holding.append(problem, rank);
    before[chosen] = problem.models[chosen].fixed_seconds + rate[chosen] * holding.cost;
  }
  return true;
}

bool assign_within_caps(const ItemProblem& problem, Holdings& holdings) {
  const ItemCaps wide = widest(problem);
  std::vector<Rank> hardest_first(problem.items());
  std::iota(hardest_first.begin(), hardest_first.end(), Rank{0});
  std::stable_sort(hardest_first.begin(), hardest_first.end(), [&](Rank a, Rank b) {
    return tightness(problem.cost[a], problem.memory_of(a), wide) >
           tightness(problem.cost[b], problem.memory_of(b), wide);
  });
  // Best fit packs tightest; spreading keeps room on every device for the last items when counts are capped too.
  for (const Fill how : {Fill::tightest, Fill::widest}) {
    if (fill(problem, hardest_first, how, holdings)) return true;
  }
  constexpr std::int64_t kSteps = 1 << 16;
  TreeSearch search{.devices = {}, .ranks = {}, .below = kNever, .target = kNever, .steps = kSteps};
  search.devices.resize(problem.devices());
  std::iota(search.devices.begin(), search.devices.end(), std::size_t{0});
  search.ranks.resize(problem.items());
  std::iota(search.ranks.begin(), search.ranks.end(), Rank{0});
  const TreeResult result = search_tree(problem, search);
  if (result.found) apply(problem, search, result, holdings);
  return result.found;
}

}  // namespace paceline::plan::detail

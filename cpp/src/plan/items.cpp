// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <paceline/error.hpp>

#include "item_checks.hpp"
#include "item_problem.hpp"

namespace paceline::plan {
namespace {

using detail::Holdings;
using detail::ItemProblem;
using detail::Rank;

// Searched as a whole.
constexpr std::size_t kExactItems = 12;
constexpr std::size_t kExactDevices = 8;

constexpr double kSlack = 1.0 + 1e-12;

ItemProblem problem_of(std::span<const double> costs, std::span<const LoadModel> models, const ItemOptions& options) {
  ItemProblem problem;
  problem.order = detail::descending_order(costs);
  problem.cost.resize(costs.size());
  for (Rank rank = 0; rank < costs.size(); ++rank) problem.cost[rank] = costs[problem.order[rank]];
  if (!options.memory.empty()) {
    problem.memory.resize(costs.size());
    for (Rank rank = 0; rank < costs.size(); ++rank) problem.memory[rank] = options.memory[problem.order[rank]];
  }
  problem.models.assign(models.begin(), models.end());
  problem.caps = options.caps;
  problem.caps.resize(models.size());
  for (ItemCaps& cap : problem.caps) {
    problem.capped = problem.capped || cap != ItemCaps{};
    cap.cost *= kSlack;
    cap.memory *= kSlack;
  }
  return problem;
}

// Sums in the order of the indices: a result's numbers follow from its items, whatever moves led there.
ItemSplit split_of(const ItemProblem& problem, std::span<const double> costs, const Holdings& holdings) {
  ItemSplit split;
  split.items.resize(problem.devices());
  split.loads.resize(problem.devices());
  std::vector<std::uint32_t> device_of(costs.size());
  for (std::size_t device = 0; device < problem.devices(); ++device) {
    split.items[device].reserve(holdings[device].ranks.size());
    for (const Rank rank : holdings[device].ranks) device_of[problem.order[rank]] = static_cast<std::uint32_t>(device);
  }
  for (std::size_t item = 0; item < costs.size(); ++item) {
    split.items[device_of[item]].push_back(static_cast<std::int64_t>(item));
    split.loads[device_of[item]] += costs[item];
  }
  for (std::size_t device = 0; device < problem.devices(); ++device) {
    if (split.items[device].empty()) continue;
    const LoadModel& model = problem.models[device];
    split.makespan_seconds =
        std::max(split.makespan_seconds, model.fixed_seconds + model.seconds_per_cost * split.loads[device]);
  }
  return split;
}

double makespan_of(const ItemProblem& problem, const Holdings& holdings) {
  return finish_of(problem, holdings, latest_of(problem, holdings));
}

// Everything in one search; true if it was not cut off.
bool search_all(const ItemProblem& problem, double below, double target, std::int64_t steps, bool& found,
                Holdings& holdings) {
  detail::TreeSearch search{.devices = {}, .ranks = {}, .below = below, .target = target, .steps = steps};
  search.devices.resize(problem.devices());
  std::iota(search.devices.begin(), search.devices.end(), std::size_t{0});
  search.ranks.resize(problem.items());
  std::iota(search.ranks.begin(), search.ranks.end(), Rank{0});
  const detail::TreeResult result = search_tree(problem, search);
  if (result.found) apply(problem, search, result, holdings);
  found = found || result.found;
  return result.complete;
}

}  // namespace

ItemSplit split_items(std::span<const double> costs, std::span<const LoadModel> models, const ItemOptions& options) {
  detail::validate_items(costs, models, options);
  const ItemProblem problem = problem_of(costs, models, options);
  double bound = lower_bound_of(problem);
  detail::require_room(problem, options, bound);

  Holdings holdings;
  const bool greedy_fits = assign_longest_first(problem, holdings);
  bool found = greedy_fits || assign_within_caps(problem, holdings);
  const Holdings greedy = greedy_fits ? holdings : Holdings{};

  const double target = bound * (1.0 + options.tolerance);
  if (found) exchange_items(problem, target, holdings);
  if (problem.items() <= kExactItems && problem.devices() <= kExactDevices) {
    const double below = found ? makespan_of(problem, holdings) : std::numeric_limits<double>::infinity();
    const bool complete =
        (found && below <= target) || search_all(problem, below, target, options.search_steps, found, holdings);
    if (!found) detail::throw_not_found(problem, options, complete);
    // Where the target was not reached, nothing better is there.
    if (complete && makespan_of(problem, holdings) > target) bound = makespan_of(problem, holdings);
  } else if (!found) {
    detail::throw_not_found(problem, options, false);
  } else {
    repartition(problem, target, options.search_steps, holdings);
  }

  // Loads that many exchanges have changed are rounded otherwise than sums: a gain that small may be none.
  const bool gained = !greedy_fits || makespan_of(problem, holdings) * kSlack < makespan_of(problem, greedy);
  ItemSplit split = split_of(problem, costs, gained ? holdings : greedy);
  split.lower_bound_seconds = split.makespan_seconds <= bound * (1.0 + 4e-12) ? split.makespan_seconds : bound;
  return split;
}

}  // namespace paceline::plan

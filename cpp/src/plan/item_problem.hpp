// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/plan/items.hpp>

namespace paceline::plan::detail {

/// An item's place in descending order of cost, on a tie the lower index first.
using Rank = std::uint32_t;

struct ItemProblem {
  std::vector<Rank> order;     ///< the item at each rank
  std::vector<double> cost;    ///< by rank: descending
  std::vector<double> memory;  ///< by rank, or empty
  std::vector<LoadModel> models;
  std::vector<ItemCaps> caps;  ///< one per device; sums already with their slack
  bool capped = false;

  [[nodiscard]] std::size_t items() const noexcept { return cost.size(); }
  [[nodiscard]] std::size_t devices() const noexcept { return models.size(); }
  [[nodiscard]] double memory_of(Rank rank) const noexcept { return memory.empty() ? 0.0 : memory[rank]; }
};

/// What one device holds.
struct Holding {
  std::vector<Rank> ranks;  ///< ascending: the costliest first
  double cost = 0.0;
  double memory = 0.0;

  [[nodiscard]] bool has_room(const ItemProblem& problem, std::size_t device, Rank rank) const noexcept {
    const ItemCaps& cap = problem.caps[device];
    return static_cast<std::int64_t>(ranks.size()) < cap.items && cost + problem.cost[rank] <= cap.cost &&
           memory + problem.memory_of(rank) <= cap.memory;
  }
  void append(const ItemProblem& problem, Rank rank) {
    ranks.push_back(rank);
    cost += problem.cost[rank];
    memory += problem.memory_of(rank);
  }
};

using Holdings = std::vector<Holding>;

/// With the items it holds; 0 without.
[[nodiscard]] inline double finish_of(const ItemProblem& problem, const Holdings& holdings, std::size_t device) {
  const LoadModel& model = problem.models[device];
  const Holding& holding = holdings[device];
  return holding.ranks.empty() ? 0.0 : model.fixed_seconds + model.seconds_per_cost * holding.cost;
}

/// The device that finishes last, on a tie the lowest index.
[[nodiscard]] inline std::size_t latest_of(const ItemProblem& problem, const Holdings& holdings) {
  std::size_t latest = 0;
  for (std::size_t device = 1; device < problem.devices(); ++device) {
    if (finish_of(problem, holdings, device) > finish_of(problem, holdings, latest)) latest = device;
  }
  return latest;
}

/// Indices in descending order of values (none negative), on a tie ascending. O(n).
[[nodiscard]] std::vector<Rank> descending_order(std::span<const double> values);

/// Longest processing time; false if an item found no room.
[[nodiscard]] bool assign_longest_first(const ItemProblem& problem, Holdings& holdings);

/// Any split within the caps, sought in orders that fill rather than balance; false if none was found.
[[nodiscard]] bool assign_within_caps(const ItemProblem& problem, Holdings& holdings);

/// No makespan is below it.
[[nodiscard]] double lower_bound_of(const ItemProblem& problem);

/// Moves and swaps until the makespan is at most `target` or neither helps.
void exchange_items(const ItemProblem& problem, double target, Holdings& holdings);

/// Splits the items of the latest device and of others anew where exchanges no longer help, then exchanges again, with
/// at most so many steps of tree searches.
void repartition(const ItemProblem& problem, double target, std::int64_t steps, Holdings& holdings);

struct TreeSearch {
  std::vector<std::size_t> devices;  ///< whose items are split anew
  std::vector<Rank> ranks;           ///< those items, ascending
  double below = 0.0;                ///< only splits that finish before it count
  double target = 0.0;               ///< good enough: the search ends there
  std::int64_t steps = 0;            ///< most placements it may try
};

struct TreeResult {
  bool found = false;
  bool complete = false;  ///< not cut off: nothing better than what was found is there
  std::int64_t steps = 0;
  std::vector<std::size_t> place;  ///< per rank searched, the position in `devices`
};

/// Depth first: the costliest item first, each tried on the device that would finish it first.
[[nodiscard]] TreeResult search_tree(const ItemProblem& problem, const TreeSearch& search);

/// Hands out what a tree search found.
void apply(const ItemProblem& problem, const TreeSearch& search, const TreeResult& result, Holdings& holdings);

}  // namespace paceline::plan::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/plan/items.hpp>

namespace paceline::plan {

// Sums of costs and times are rounded. Numbers that differ by less than this part count as equal.
inline constexpr double kRounding = 1.0 + 1e-12;

/// An item's place in descending order of cost. Equal items are in the order of their indices.
using Rank = std::uint32_t;

struct ItemProblem {
  std::vector<Rank> order;   ///< the item at each rank
  std::vector<double> cost;  ///< by rank: descending
  std::vector<LoadModel> models;

  [[nodiscard]] std::size_t items() const noexcept { return cost.size(); }
  [[nodiscard]] std::size_t devices() const noexcept { return models.size(); }
};

/// @throws InvalidArgument as split_items does.
[[nodiscard]] ItemProblem item_problem(std::span<const double> costs, std::span<const LoadModel> models);

/// What one device holds.
struct Holding {
  std::vector<Rank> ranks;  ///< ascending: the costliest first
  double cost = 0.0;

  void append(const ItemProblem& problem, Rank rank) {
    ranks.push_back(rank);
    cost += problem.cost[rank];
  }
};

using Holdings = std::vector<Holding>;

/// When a device finishes the items that it holds; 0 if it holds none.
[[nodiscard]] inline double finish_of(const ItemProblem& problem, const Holdings& holdings, std::size_t device) {
  const Holding& holding = holdings[device];
  return holding.ranks.empty() ? 0.0 : problem.models[device].seconds(holding.cost);
}

/// The device that finishes last. Among equals the one with the lowest index.
[[nodiscard]] inline std::size_t latest_of(const ItemProblem& problem, const Holdings& holdings) {
  std::size_t latest = 0;
  for (std::size_t device = 1; device < problem.devices(); ++device) {
    if (finish_of(problem, holdings, device) > finish_of(problem, holdings, latest)) latest = device;
  }
  return latest;
}

[[nodiscard]] inline double makespan_of(const ItemProblem& problem, const Holdings& holdings) {
  return finish_of(problem, holdings, latest_of(problem, holdings));
}

/// A lower bound of the makespan.
[[nodiscard]] double lower_bound_of(const ItemProblem& problem);

/// Moves and swaps until the makespan is at most `target` or neither helps.
void exchange_items(const ItemProblem& problem, double target, Holdings& holdings);

/// Searches all placements depth first. It places the costliest item first, and tries the device first that would
/// finish it first. The search ends at `target`. A better placement replaces `holdings`. Returns true if it is proven
/// that no better one exists.
bool search_items(const ItemProblem& problem, double target, Holdings& holdings);

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

// A reference for split_items on equal devices.

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace paceline::plan::testing {

/// The largest load by the largest differencing method for k parts (Karmarkar & Karp, The differencing method of set
/// partitioning, report UCB/CSD 82/113, Berkeley 1982). Each item starts as a partial split of its own. The two partial
/// splits with the largest difference between their parts are joined first, the largest part of one with the smallest
/// of the other.
inline double largest_differencing_load(const std::vector<double>& costs, std::size_t parts) {
  using Loads = std::vector<double>;  // descending
  using Partial = std::pair<double, Loads>;
  std::priority_queue<Partial> open;
  for (const double cost : costs) {
    Loads loads(parts, 0.0);
    loads.front() = cost;
    open.emplace(loads.front() - loads.back(), std::move(loads));
  }
  while (open.size() > 1) {
    Loads joined = open.top().second;
    open.pop();
    const Loads other = open.top().second;
    open.pop();
    for (std::size_t i = 0; i < parts; ++i) joined[i] += other[parts - 1 - i];
    std::sort(joined.begin(), joined.end(), std::greater<>());
    open.emplace(joined.front() - joined.back(), std::move(joined));
  }
  return open.empty() ? 0.0 : open.top().second.front();
}

}  // namespace paceline::plan::testing

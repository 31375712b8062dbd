// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// The seconds of a batch whose number of jobs times its largest cost is `cost`.
inline double seconds_of(const CostModel& model, double cost) {
  return model.fixed_seconds() + model.per_item_seconds() * cost;
}

/// Cuts jobs into batches for one device, each padded to its costliest job, so that their seconds are the least in sum.
/// Returns the batch with the first job, as indices in ascending order. `costs` are in the order of the queue, one at
/// least. `sizes` ascend from 1.
///
/// Exact: with the numbers of jobs in the batches given, no exchange of jobs makes the sum less if each batch holds
/// neighbours in the order of costs. Where to cut that order is dynamic programming from its end. Of equally good cuts,
/// that whose first batches are the largest. O(n log n + n * sizes).
inline std::vector<std::size_t> first_padded_batch(std::span<const double> costs, const CostModel& model,
                                                   std::span<const std::int64_t> sizes) {
  const std::size_t count = costs.size();
  std::vector<std::pair<double, std::size_t>> order(count);
  for (std::size_t job = 0; job < count; ++job) order[job] = {costs[job], job};
  std::ranges::sort(order);
  std::vector<double> rest(count + 1, 0.0);  // seconds of the jobs from there on
  std::vector<std::size_t> taken(count);     // the jobs in the batch that begins there
  for (std::size_t from = count; from-- > 0;) {
    double best = std::numeric_limits<double>::infinity();
    std::int64_t jobs = 1;
    for (const std::int64_t size : sizes) {
      const std::size_t end = from + static_cast<std::size_t>(size);
      if (end > count) break;
      const double seconds = seconds_of(model, static_cast<double>(size) * order[end - 1].first) + rest[end];
      jobs = seconds <= best ? size : jobs;
      best = std::min(seconds, best);
    }
    rest[from] = best;
    taken[from] = static_cast<std::size_t>(jobs);
  }
  const auto first = static_cast<std::size_t>(
      std::ranges::find(order, std::size_t{0}, &decltype(order)::value_type::second) - order.begin());
  std::size_t from = 0;
  while (from + taken[from] <= first) from += taken[from];
  std::vector<std::size_t> batch;
  for (std::size_t job = from; job < from + taken[from]; ++job) batch.push_back(order[job].second);
  std::ranges::sort(batch);
  return batch;
}

}  // namespace paceline::plan

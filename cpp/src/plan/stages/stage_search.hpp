// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plan/stages/finalists.hpp"

namespace paceline::plan {

/// What the searches of plan_stages() share.
struct StageSearch {
  const StageCosts& costs;
  const StageOptions& options;
  Finalists& finalists;
  StageClock& clock;

  [[nodiscard]] bool fits_options(std::size_t stage, std::size_t device) const {
    return options.order.empty() || (stage < options.order.size() && options.order[stage] == device);
  }
  /// The depths of a partition. `all`: all of them are tried. False if it cannot win, or does not fit.
  bool offer(const Partition& partition, std::int64_t micro_batches, bool all) const;
};

/// Tries all partitions and depths with these numbers of micro-batches, except those whose bound shows that they cannot
/// win. False, with nothing tried, if these are too many.
bool try_all(const StageSearch& search, const std::vector<std::int64_t>& micro_batches);

/// Numbers of micro-batches to try: all of them up to 64. Beyond, one for each largest size on a grid of ratio 1.2. For
/// given cuts a step takes about a + b m + c / m, which stays within 2 % of its least if m is off by 1.2, and the search
/// then improves m itself. Not more than 1,024: what more would save of filling and draining is below 1 / 1,024 of the
/// step per stage.
[[nodiscard]] std::vector<std::int64_t> micro_batch_grid(std::int64_t batch_size);

/// Finds partitions by the subset program: for each number of micro-batches, those that meet lower and lower bounds.
void try_sets(const StageSearch& search, const std::vector<std::int64_t>& micro_batches);

/// Improves the best plans step by step: other cuts, orders, devices, and numbers of micro-batches.
void try_neighbours(const StageSearch& search);

/// Why nothing fits. @throws OutOfMemory
[[noreturn]] void refuse_memory(const StageCosts& costs, const StageOptions& options);

}  // namespace paceline::plan

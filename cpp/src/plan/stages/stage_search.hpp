// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plan/stages/finalists.hpp"

namespace paceline::plan {

/// A plan whose time with usual depths is this close to the best may become the best with its own depths.
inline constexpr double kPromising = 1.005;

/// What the searches of plan_stages() share.
struct StageSearch {
  const StageCosts& costs;
  const StageOptions& options;
  Finalists& finalists;
  StageClock& clock;

  [[nodiscard]] bool fits_options(std::size_t stage, std::size_t device) const {
    return options.order.empty() || (stage < options.order.size() && options.order[stage] == device);
  }
  /// Offers a partition with good depths, improved if its time with usual ones is below `promising`.
  /// Returns these, with infinite seconds if the partition cannot win or does not fit.
  Depths offer(const Partition& partition, std::int64_t micro_batches, double promising,
               std::span<const std::int64_t> hint = {}) const;

 private:
  /// Sets the clock. False if the partition cannot win, or does not fit.
  bool set_clock(const Partition& partition, std::int64_t micro_batches) const;
};

/// Numbers of micro-batches to try: all of them up to `all_up_to`, and beyond a grid of ratio 1.2. For given cuts a
/// step takes about a + b m + c / m, which stays within 2 % of its least if m is off by 1.2, and the search then
/// improves m itself. Also the least number with the same largest size as each of these: the first micro-batch fills
/// the pipeline, so a step is shorter just where that size falls. Not more than 1,024: what more would save of filling
/// and draining is below 1 / 1,024 of the step per stage.
[[nodiscard]] std::vector<std::int64_t> micro_batch_grid(std::int64_t batch_size, std::int64_t all_up_to);

/// Finds partitions by the subset program: for each number of micro-batches, those that meet lower and lower bounds.
/// Returns the best plans of different sizes of micro-batches, best first.
std::vector<FoundPlan> try_sets(const StageSearch& search);

/// Improves each plan step by step: other cuts, orders, devices, and numbers of micro-batches.
void try_neighbours(const StageSearch& search, const std::vector<FoundPlan>& starts);

/// Goes through the partitions that can win with these numbers of micro-batches, one after the other, until it has
/// taken too long. Where blocks and devices are few, these are all, with all depths. Where they are more, this finds
/// what steps from neighbour to neighbour do not reach.
void try_partitions(const StageSearch& search, const std::vector<std::int64_t>& micro_batches);

/// Offers the partition that needs the least memory: with one micro-batch in flight on each stage.
void try_least_memory(const StageSearch& search, std::int64_t micro_batches);

/// Why nothing fits. @throws OutOfMemory
[[noreturn]] void refuse_memory(const StageCosts& costs, const StageOptions& options);

}  // namespace paceline::plan

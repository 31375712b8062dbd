// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/stages.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>

#include "plan/stages/stage_search.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

// So few depths are all tried for a partition that may win.
constexpr std::int64_t kAllDepths = 400;

void check_options(const StageCosts& costs, const StageOptions& options) {
  const std::int64_t batch = costs.problem().batch_size;
  if (options.micro_batches && (*options.micro_batches < 1 || *options.micro_batches > batch))
    refuse("micro_batches is {}; a batch of {} items has between 1 and {}", *options.micro_batches, batch, batch);
  check_cuts(costs, options.cuts, "cuts");
  check_order(costs, options.order, "order");
  if (!options.cuts.empty() && !options.order.empty() && options.cuts.size() != options.order.size())
    refuse("there are {} cuts, but {} devices in order; each stage has one of both", options.cuts.size(),
           options.order.size());
  if (options.cuts.size() > costs.devices() || options.order.size() > costs.blocks())
    refuse("{} stages are too many for {} devices and {} blocks", std::max(options.cuts.size(), options.order.size()),
           costs.devices(), costs.blocks());
  if (options.most_in_flight < 0)
    refuse("most_in_flight is {}; it is a number of micro-batches, or 0 for no limit", options.most_in_flight);
  if (!(options.indifference >= 0.0) || !std::isfinite(options.indifference))
    refuse("indifference is {}; it must be finite and not negative, 0.01 for one per cent", options.indifference);
  check_cuts(costs, options.previous_cuts, "previous_cuts");
  if (options.previous_cuts.size() != options.previous_order.size())
    refuse("there are {} previous_cuts, but {} devices in previous_order", options.previous_cuts.size(),
           options.previous_order.size());
}

/// Plans that move little are near the present one.
void try_previous(const StageSearch& search) {
  const StageOptions& options = search.options;
  const Partition previous{options.previous_cuts, options.previous_order};
  const auto gone = [&](std::size_t device) {
    return device >= search.costs.devices() || std::ranges::count(previous.order, device) > 1;
  };
  if (search.finalists.best() == nullptr || previous.cuts.empty() || !options.cuts.empty() || !options.order.empty() ||
      std::ranges::any_of(previous.order, gone))
    return;
  const std::int64_t micro_batches = search.finalists.best()->micro_batches;
  Depths depths = search.offer(previous, micro_batches, std::numeric_limits<double>::infinity());
  if (!depths.depths.empty())
    try_neighbours(search, {{previous, micro_batches, std::move(depths.depths), depths.seconds, 0}});
}

}  // namespace

bool StageSearch::set_clock(const Partition& partition, std::int64_t micro_batches) const {
  const BatchSizes sizes(costs.problem().batch_size, micro_batches);
  return stage_bound(costs, partition, sizes) <= finalists.limit(partition.stages()) &&
         clock.set(partition, sizes, options.most_in_flight);
}

Depths StageSearch::offer(const Partition& partition, std::int64_t micro_batches, double promising,
                          std::span<const std::int64_t> hint) const {
  Depths depths{{}, std::numeric_limits<double>::infinity()};
  if (!set_clock(partition, micro_batches)) return depths;
  if (options.schedule != StageOptions::Kind::gpipe) {
    depths = good_depths(clock, promising, hint);
    if (depths.seconds < promising && depth_count(clock) <= kAllDepths) depths = best_depths(clock);
  } else if (clock.most_depths().back() == micro_batches) {
    depths.depths.assign(partition.stages(), micro_batches);
    depths.seconds = clock.seconds(depths.depths);
  }
  if (!depths.depths.empty()) finalists.offer(partition, micro_batches, depths);
  return depths;
}

StagePlan plan_stages(const StageProblem& problem, const StageOptions& options) {
  const StageCosts costs(problem);
  check_options(costs, options);
  Finalists finalists(costs, options);
  StageClock clock(costs);
  const StageSearch search{costs, options, finalists, clock};
  std::vector<std::int64_t> micro_batches =
      options.micro_batches ? std::vector{*options.micro_batches} : micro_batch_grid(problem.batch_size, 64);
  std::vector<FoundPlan> starts = try_sets(search);
  if (starts.empty()) try_least_memory(search, micro_batches.back());
  if (starts.empty() && finalists.best() != nullptr) starts.push_back(*finalists.best());
  try_neighbours(search, starts);
  if (const FoundPlan* best = finalists.best()) starts.insert(starts.begin(), *best);
  // The most promising numbers first.
  for (const FoundPlan& start : std::views::reverse(starts)) {
    const auto found = std::ranges::find(micro_batches, start.micro_batches);
    if (found != micro_batches.end()) micro_batches.erase(found);
    micro_batches.insert(micro_batches.begin(), start.micro_batches);
  }
  try_partitions(search, micro_batches);
  try_previous(search);
  // The grid ends before the smallest micro-batches, which need the least memory.
  if (finalists.best() == nullptr) try_least_memory(search, options.micro_batches.value_or(problem.batch_size));
  if (finalists.best() == nullptr) refuse_memory(costs, options);
  const FoundPlan winner = finalists.winner();
  StagePlan plan = stage_plan(costs, winner.partition, schedule_of_depths(winner.depths, winner.micro_batches));
  plan.moved_bytes = winner.moved_bytes;
  return plan;
}

StagePlan evaluate_stages(const StageProblem& problem, std::span<const std::size_t> cuts,
                          std::span<const std::size_t> order, std::int64_t micro_batches, const Schedule& schedule) {
  const StageCosts costs(problem);
  if (cuts.empty() || cuts.size() != order.size() || schedule.stages.size() != cuts.size())
    refuse(
        "there are {} cuts, {} devices in order and {} stages in the schedule; a "
        "pipeline has the same number of each, and at least one",
        cuts.size(), order.size(), schedule.stages.size());
  check_cuts(costs, cuts, "cuts");
  check_order(costs, order, "order");
  if (micro_batches != schedule.micro_batches || micro_batches < 1 || micro_batches > problem.batch_size)
    refuse("micro_batches is {}; the schedule has {}, and the batch {} items", micro_batches, schedule.micro_batches,
           problem.batch_size);
  check(schedule);
  return stage_plan(costs, {{cuts.begin(), cuts.end()}, {order.begin(), order.end()}}, schedule);
}

}  // namespace paceline::plan

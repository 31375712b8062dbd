// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/stages.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include <paceline/error.hpp>

#include "plan/stages/stage_search.hpp"

namespace paceline::plan {
namespace {

void check_options(const StageCosts& costs, const StageOptions& options) {
  const std::int64_t batch = costs.problem().batch_size;
  if (options.micro_batches && (*options.micro_batches < 1 || *options.micro_batches > batch))
    throw InvalidArgument(fmt::format("micro_batches is {}; a batch of {} items has between 1 and {}",
                                      *options.micro_batches, batch, batch));
  check_cuts(costs, options.cuts, "cuts");
  check_order(costs, options.order, "order");
  if (!options.cuts.empty() && !options.order.empty() && options.cuts.size() != options.order.size())
    throw InvalidArgument(fmt::format("there are {} cuts, but {} devices in order; each stage has one of both",
                                      options.cuts.size(), options.order.size()));
  if (options.cuts.size() > costs.devices() || options.order.size() > costs.blocks())
    throw InvalidArgument(fmt::format("{} stages are too many for {} devices and {} blocks",
                                      std::max(options.cuts.size(), options.order.size()), costs.devices(),
                                      costs.blocks()));
  if (options.most_in_flight < 0)
    throw InvalidArgument(fmt::format("most_in_flight is {}; it is a number of micro-batches, or 0 for no limit",
                                      options.most_in_flight));
  if (!(options.indifference >= 0.0) || !std::isfinite(options.indifference))
    throw InvalidArgument(fmt::format("indifference is {}; it must be finite and not negative, 0.01 for one per cent",
                                      options.indifference));
  check_cuts(costs, options.previous_cuts, "previous_cuts");
  if (options.previous_cuts.size() != options.previous_order.size())
    throw InvalidArgument(fmt::format("there are {} previous_cuts, but {} devices in previous_order",
                                      options.previous_cuts.size(), options.previous_order.size()));
}

}  // namespace

bool StageSearch::offer(const Partition& partition, std::int64_t micro_batches, bool all) const {
  const BatchSizes sizes(costs.problem().batch_size, micro_batches);
  const double limit = finalists.limit(partition.stages());
  if (!clock.set(partition, sizes, options.most_in_flight) || clock.bound() > limit) return false;
  if (options.schedule == StageOptions::Kind::gpipe) {
    const std::vector<std::int64_t> depths(partition.stages(), micro_batches);
    if (clock.most_depths().back() < micro_batches) return false;
    finalists.offer(partition, micro_batches, {depths, clock.seconds(depths)});
    return true;
  }
  finalists.offer(partition, micro_batches, all ? best_depths(clock) : good_depths(clock, limit));
  return true;
}

StagePlan plan_stages(const StageProblem& problem, const StageOptions& options) {
  const StageCosts costs(problem);
  check_options(costs, options);
  Finalists finalists(costs, options);
  StageClock clock(costs);
  const StageSearch search{costs, options, finalists, clock};
  const std::vector<std::int64_t> micro_batches = options.micro_batches ? std::vector{*options.micro_batches}
                                                                        : micro_batch_grid(problem.batch_size);
  if (!try_all(search, micro_batches)) {
    try_sets(search, micro_batches);
    try_neighbours(search);
  }
  if (finalists.best() == nullptr) refuse_memory(costs, options);
  const Candidate winner = finalists.winner();
  Schedule schedule = schedule_of_depths(winner.depths, winner.micro_batches);
  StagePlan plan = stage_plan(costs, winner.partition, schedule);
  plan.moved_bytes = winner.moved_bytes;
  return plan;
}

StagePlan evaluate_stages(const StageProblem& problem, std::span<const std::size_t> cuts,
                          std::span<const std::size_t> order, std::int64_t micro_batches, const Schedule& schedule) {
  const StageCosts costs(problem);
  if (cuts.empty() || cuts.size() != order.size() || schedule.stages.size() != cuts.size())
    throw InvalidArgument(
        fmt::format("there are {} cuts, {} devices in order and {} stages in the schedule; a "
                    "pipeline has the same number of each, and at least one",
                    cuts.size(), order.size(), schedule.stages.size()));
  check_cuts(costs, cuts, "cuts");
  check_order(costs, order, "order");
  if (micro_batches != schedule.micro_batches || micro_batches < 1 || micro_batches > problem.batch_size)
    throw InvalidArgument(fmt::format("micro_batches is {}; the schedule has {}, and the batch {} items", micro_batches,
                                      schedule.micro_batches, problem.batch_size));
  check(schedule);
  return stage_plan(costs, {{cuts.begin(), cuts.end()}, {order.begin(), order.end()}}, schedule);
}

}  // namespace paceline::plan

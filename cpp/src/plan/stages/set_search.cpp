// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include "plan/stages/stage_search.hpp"
#include "plan/stages/subset_program.hpp"

namespace paceline::plan {
namespace {

// The search for the least bound stops at this part of it. The steps from cut to cut that follow are finer.
constexpr double kPrecision = 0.008;
// Beyond so many devices, only some numbers of stages are tried where memory binds.
constexpr std::size_t kAllDepthsDevices = 8;
// The recurrence comes this close to the bound or closer with most partitions; a number of micro-batches whose least
// bound is higher by more than this does not win. Where memory keeps few in flight, the recurrence stays further away.
constexpr double kBoundSlack = 1.02;
constexpr double kTightSlack = 1.1;
// So many plans are improved step by step.
constexpr std::size_t kStarts = 4;
constexpr double kGrid = 1.2;
constexpr std::int64_t kMostMicroBatches = 1024;

class SetSearch {
 public:
  SetSearch(const StageSearch& search, const DeviceSets& sets)
      : search_(search), program_(search.costs, search.options, sets) {
    for (const StageDevice& device : search.costs.problem().devices) speeds_ += device.speed;
  }

  /// The least seconds for m micro-batches, if nothing is ever waited for.
  [[nodiscard]] double ideal(std::int64_t m) const {
    const StageCosts& costs = search_.costs;
    return costs.work(0, costs.blocks(), 0, static_cast<double>(costs.problem().batch_size), static_cast<double>(m)) *
           costs.problem().devices[0].speed / speeds_;
  }

  /// Bounds of partitions that obey a rule for depths.
  struct Bounds {
    double unmet = 0.0;  ///< no partition has one as low as this
    double met = 0.0;    ///< the least that was found; infinity if none was
  };

  /// Lowers the bound of partitions that obey the rule, beginning below what can win. `unmet` is known before.
  Bounds lower(std::int64_t m, const DepthRule& depth, double unmet = 0.0) {
    const double infinity = std::numeric_limits<double>::infinity();
    double& least_bound =
        least_bounds_.try_emplace({depth.most == m ? 0 : depth.most, depth.stages, depth.alike}, infinity)
            .first->second;
    const double limit =
        std::min(search_.finalists.best_seconds(), least_bound * (depth.stages == 0 ? kBoundSlack : kTightSlack));
    double low = std::max(ideal(m), unmet);
    double high = infinity;
    PartitionGoal goal{BatchSizes(search_.costs.problem().batch_size, m), depth, limit, 0};
    while (low * (1.0 + kPrecision) < std::min(high, limit)) {
      const std::optional<Partition> found = program_.find(goal);
      if (found) {
        high = depth.alike == 1 ? stage_bound(search_.costs, *found, goal.sizes) : goal.seconds;
        Depths depths = search_.offer(*found, m, search_.finalists.best_seconds());
        FoundPlan& best = best_[m];
        if (depths.seconds < best.seconds) best = {*found, m, std::move(depths.depths), depths.seconds, 0};
        least_bound = std::min(least_bound, high);
      } else {
        low = goal.seconds;
        if (std::isinf(high)) break;
      }
      goal.seconds = low + (high - low) / 2.0;
    }
    return {low, high};
  }

  /// The best plans of the best sizes: to another size is a long way by single steps.
  [[nodiscard]] std::vector<FoundPlan> best() const {
    std::vector<FoundPlan> plans;
    for (const auto& [m, plan] : best_)
      if (!std::isinf(plan.seconds)) plans.push_back(plan);
    std::ranges::stable_sort(plans, {}, &FoundPlan::seconds);
    if (plans.size() > kStarts) plans.resize(kStarts);
    return plans;
  }

 private:
  const StageSearch& search_;
  SubsetProgram program_;
  double speeds_ = 0.0;
  std::map<std::tuple<std::int64_t, std::size_t, std::size_t>, double> least_bounds_;  // of each rule for depths
  std::map<std::int64_t, FoundPlan> best_;  // by the largest size of a micro-batch
};

/// Where many stages have little memory, not each of them can have one more in flight than the next one.
void try_alike(const StageSearch& search, SetSearch& program, std::size_t most_stages) {
  const StageOptions& options = search.options;
  const std::int64_t batch = search.costs.problem().batch_size;
  for (const std::int64_t size : {1, 2, 4}) {
    const std::int64_t m = options.micro_batches.value_or(std::min((batch - 1) / size + 1, kMostMicroBatches));
    const std::int64_t most = options.most_in_flight == 0 ? m : std::min(m, options.most_in_flight);
    for (const std::size_t alike : {2, 3, 4})
      for (std::size_t stages = most_stages; stages > 1; stages -= std::min(most_stages / 8, stages))
        (void)program.lower(m, {most, stages, alike});
    if (options.micro_batches) break;
  }
}

}  // namespace

std::vector<std::int64_t> micro_batch_grid(std::int64_t batch_size, std::int64_t all_up_to) {
  const std::int64_t most = std::min(batch_size, kMostMicroBatches);
  std::vector<std::int64_t> grid{most};
  for (std::int64_t m = 1; m < most;) {
    const std::int64_t size = (batch_size - 1) / m + 1;
    grid.push_back(m);
    grid.push_back((batch_size - 1) / size + 1);
    m = m < all_up_to ? m + 1 : std::max(m + 1, static_cast<std::int64_t>(static_cast<double>(m) * kGrid));
  }
  std::ranges::sort(grid);
  grid.erase(std::unique(grid.begin(), grid.end()), grid.end());
  return grid;
}

std::vector<FoundPlan> try_sets(const StageSearch& search) {
  const StageOptions& options = search.options;
  const DeviceSets sets(search.costs, options.order, kMostSets);
  SetSearch program(search, sets);
  const std::size_t most_stages = std::min(search.costs.devices(), search.costs.blocks());
  std::vector<std::int64_t> micro_batches = options.micro_batches
                                                ? std::vector{*options.micro_batches}
                                                : micro_batch_grid(search.costs.problem().batch_size, 8);
  // Likely numbers first: what comes later is then cut short by what was found.
  const double likely = 4.0 * static_cast<double>(most_stages);
  std::ranges::stable_sort(micro_batches, {},
                           [&](std::int64_t m) { return std::abs(std::log(static_cast<double>(m) / likely)); });
  bool binds = false;
  for (const std::int64_t m : micro_batches) {
    if (options.schedule == StageOptions::Kind::gpipe) {
      (void)program.lower(m, {m, 0});
      continue;
    }
    const std::int64_t most = options.most_in_flight == 0 ? m : std::min(m, options.most_in_flight);
    const SetSearch::Bounds deep = program.lower(m, {most, 0});
    // Where memory does not bind, nothing better is found with less in flight.
    const SetSearch::Bounds shallow = program.lower(m, {1, 0});
    binds = shallow.met < deep.met * (1.0 - kPrecision) || binds;
    if (!binds) continue;
    const std::size_t step = std::max<std::size_t>(most_stages / 4, 1);
    for (std::size_t stages = most_stages; stages > 1; stages -= std::min(step, stages))
      (void)program.lower(m, {most, stages}, shallow.unmet);
  }
  if (binds && most_stages > kAllDepthsDevices) try_alike(search, program, most_stages);
  return program.best();
}

}  // namespace paceline::plan

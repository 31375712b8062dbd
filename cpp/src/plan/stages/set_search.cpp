// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "plan/stages/stage_search.hpp"
#include "plan/stages/subset_program.hpp"

namespace paceline::plan {
namespace {

// Sets of devices: all of 8 unlike devices have 256. More sets than this take too long for plans in a second.
constexpr std::size_t kMostSets = 2048;
// The search for the least bound stops at this part of it. The steps from cut to cut that follow are finer.
constexpr double kPrecision = 0.004;
constexpr std::int64_t kAllUpTo = 64;
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

  /// Lowers the bound of partitions that obey the rule for depths, beginning below the best plan so far.
  void lower(std::int64_t m, const DepthRule& depth) {
    double low = ideal(m);
    double high = std::min(search_.finalists.best_seconds(), most_seconds(m));
    PartitionGoal goal{BatchSizes(search_.costs.problem().batch_size, m), depth, high * (1.0 - kPrecision), 0};
    if (std::isinf(search_.finalists.best_seconds())) goal.seconds = std::numeric_limits<double>::infinity();
    while (goal.seconds > low) {
      const std::optional<Partition> found = program_.find(goal);
      if (found) {
        search_.offer(*found, m, false);
        high = std::min(goal.seconds, stage_bound(search_.costs, *found, goal.sizes));
      } else {
        low = goal.seconds;
        if (std::isinf(low)) return;
      }
      if (high <= low * (1.0 + kPrecision)) return;
      goal.seconds = low + (high - low) / 2.0;
    }
  }

 private:
  /// All work on the slowest device.
  [[nodiscard]] double most_seconds(std::int64_t m) const {
    double slowest = std::numeric_limits<double>::infinity();
    for (const StageDevice& device : search_.costs.problem().devices) slowest = std::min(slowest, device.speed);
    return ideal(m) * speeds_ / slowest * 2.0;
  }

  const StageSearch& search_;
  SubsetProgram program_;
  double speeds_ = 0.0;
};

}  // namespace

std::vector<std::int64_t> micro_batch_grid(std::int64_t batch_size) {
  std::vector<std::int64_t> grid;
  if (batch_size <= kAllUpTo) {
    for (std::int64_t m = 1; m <= batch_size; ++m) grid.push_back(m);
    return grid;
  }
  for (double size = static_cast<double>(batch_size);; size = std::min(size - 1.0, size / kGrid)) {
    const auto largest = static_cast<std::int64_t>(std::max(size, 1.0));
    const std::int64_t m = (batch_size - 1) / largest + 1;
    if (m > kMostMicroBatches) break;
    if (grid.empty() || m > grid.back()) grid.push_back(m);
    if (largest == 1) break;
  }
  return grid;
}

void try_sets(const StageSearch& search, const std::vector<std::int64_t>& micro_batches) {
  const DeviceSets sets(search.costs, search.options.order, kMostSets);
  SetSearch program(search, sets);
  // Likely numbers first: what comes later is then cut short by what was found.
  const double likely = 4.0 * static_cast<double>(std::min(search.costs.devices(), search.costs.blocks()));
  std::vector<std::int64_t> in_order = micro_batches;
  std::ranges::stable_sort(in_order, {}, [&](std::int64_t m) { return std::abs(std::log(static_cast<double>(m) / likely)); });
  const std::size_t most_stages = std::min(search.costs.devices(), search.costs.blocks());
  for (const std::int64_t m : in_order) {
    if (program.ideal(m) > search.finalists.best_seconds()) continue;
    if (search.options.schedule == StageOptions::Kind::gpipe) {
      program.lower(m, {m, 0});
      continue;
    }
    const std::int64_t most = search.options.most_in_flight == 0 ? m : std::min(m, search.options.most_in_flight);
    program.lower(m, {most, 0});
    program.lower(m, {1, 0});
    for (std::size_t stages = 2; stages <= most_stages; ++stages) program.lower(m, {most, stages});
  }
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/batch_plan.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <paceline/engine/step.hpp>
#include <paceline/per_device.hpp>

namespace paceline {

double BatchPlan::work(std::size_t place, std::int64_t begin, std::int64_t end) const noexcept {
  if (begin >= end) return 0.0;
  const plan::ItemShape& shape = shapes[place];
  if (shape.measure == plan::ItemMeasure::sum) {
    return shape.micro_batch({ordered_costs.begin() + begin, ordered_costs.begin() + end});
  }
  // The first item is the longest.
  return shape.cost.fixed_seconds +
         static_cast<double>(end - begin) * shape.item(ordered_costs[static_cast<std::size_t>(begin)]);
}

double BatchPlan::memory_size(std::int64_t begin, std::int64_t end) const noexcept {
  const auto items = static_cast<double>(end - begin);
  if (!by_cost() || begin >= end) return items;
  return items * std::max(least_cost, ordered_costs[static_cast<std::size_t>(begin)]);
}

std::vector<double> BatchPlan::costs_of(const StepRecord& record) const {
  if (!by_cost()) return {};
  PerDevice<double> sums(devices);
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    const double* const first = ordered_costs.data();
    double& sum = sums[mb.device];
    sum = std::accumulate(first + mb.begin, first + mb.end, sum);
  }
  return sums.values();
}

balance::StepTimings BatchPlan::timings(const StepRecord& record) const {
  if (!by_cost()) return record.timings(devices);
  struct Sum {
    double work = 0.0;
    double seconds = 0.0;
    bool any_excluded = false;
  };
  PerDevice<Sum> sums(devices);
  double all = 0.0;
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    // Work is counted by the shape of the device that ran it.
    const double done = work(sums.place(mb.device), mb.begin, mb.end);
    all += done;
    Sum& sum = sums[mb.device];
    sum.any_excluded = sum.any_excluded || claim.excluded;
    if (claim.excluded) continue;
    sum.work += done;
    sum.seconds += claim.seconds();
  }
  balance::StepTimings timings{.devices = {},
                               .reduction_seconds = record.reduce_seconds,
                               .startup_seconds = record.startup_seconds,
                               .lent_parts = record.lent_parts};
  bool comparable = true;
  for (const auto& [id, sum] : sums) {
    std::vector<balance::MicroBatchTiming>& own = timings.devices.emplace_back();
    const auto units = static_cast<std::int64_t>(std::llround(sum.work));
    if (units > 0 && sum.seconds > 0.0) own.push_back({units, sum.seconds, false});
    if (sum.any_excluded) own.push_back({0, 0.0, true});
    comparable = comparable && !sum.any_excluded;
  }
  if (comparable && all > 0.0) {
    timings.step_seconds = record.compute_seconds * static_cast<double>(balance.batch_size) / all;
  }
  return timings;
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/batch_plan.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <paceline/engine/step.hpp>

namespace paceline {

double BatchPlan::work(DeviceId device, std::int64_t begin, std::int64_t end) const noexcept {
  if (begin >= end) return 0.0;
  const plan::ItemShape& shape = shapes[device];
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
  std::vector<double> sums(shares.size(), 0.0);
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    const double* const first = ordered_costs.data();
    sums[mb.device] = std::accumulate(first + mb.begin, first + mb.end, sums[mb.device]);
  }
  return sums;
}

balance::StepTimings BatchPlan::timings(const StepRecord& record) const {
  if (!by_cost()) return record.timings(shares.size());
  struct Sum {
    double work = 0.0;
    double seconds = 0.0;
    bool any_excluded = false;
  };
  std::vector<Sum> sums(shapes.size());
  double all = 0.0;
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    // Work is counted by the shape of the device that ran it.
    const double done = work(mb.device, mb.begin, mb.end);
    all += done;
    Sum& sum = sums[mb.device];
    sum.any_excluded = sum.any_excluded || claim.excluded;
    if (claim.excluded) continue;
    sum.work += done;
    sum.seconds += claim.finish_seconds - claim.start_seconds;
  }
  balance::StepTimings timings{.devices = std::vector<std::vector<balance::MicroBatchTiming>>(shapes.size()),
                               .reduction_seconds = record.reduce_seconds,
                               .startup_seconds = record.startup_seconds};
  bool comparable = true;
  for (std::size_t d = 0; d < sums.size(); ++d) {
    const auto units = static_cast<std::int64_t>(std::llround(sums[d].work));
    if (units > 0 && sums[d].seconds > 0.0) timings.devices[d].push_back({units, sums[d].seconds, false});
    if (sums[d].any_excluded) timings.devices[d].push_back({0, 0.0, true});
    comparable = comparable && !sums[d].any_excluded;
  }
  if (comparable && all > 0.0) {
    timings.step_seconds = record.compute_seconds * static_cast<double>(balance.batch_size) / all;
  }
  return timings;
}

}  // namespace paceline

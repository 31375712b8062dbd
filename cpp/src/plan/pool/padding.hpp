// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <paceline/plan/cost_model.hpp>

#include "plan/pool/job_slots.hpp"

namespace paceline::plan {

/// The seconds of a batch whose number of jobs times its largest cost is `cost`.
inline double seconds_of(const CostModel& model, double cost) {
  return model.fixed_seconds() + model.per_item_seconds() * cost;
}

/// Cuts jobs into batches for one device, each padded to its costliest job, so that their seconds are the least in sum.
///
/// Exact: with the numbers of jobs in the batches given, no exchange of jobs makes the sum less if each batch holds
/// neighbours in the order of costs. Where to cut that order is dynamic programming from its end. Of equally good cuts,
/// that whose first batches are the largest. O(n * sizes).
///
/// Keeps its memory from call to call.
class PaddedCuts {
 public:
  /// The batch with the job at `place`: the first of its jobs, and the one after its last. `costs` ascend; one at
  /// least. `sizes` ascend from 1.
  std::pair<std::size_t, std::size_t> batch_at(std::span<const double> costs, std::size_t place, const CostModel& model,
                                               std::span<const std::int64_t> sizes) {
    const std::size_t count = costs.size();
    numbers_.assign(sizes.begin(), sizes.end());
    rest_.resize(count + 1);
    rest_[count] = 0.0;
    // Of the jobs from there on, if the first batch is of that size.
    const auto seconds = [fixed = model.fixed_seconds(), each = model.per_item_seconds(), cost = costs.data(),
                          rest = rest_.data(), size = sizes.data(),
                          number = numbers_.data()](std::size_t from, std::size_t k) {
      const std::size_t end = from + static_cast<std::size_t>(size[k]);
      return fixed + each * (number[k] * cost[end - 1]) + rest[end];
    };
    // Only the least seconds, in two sums that the processor works at side by side: noting the sizes, too, takes twice
    // as long, and few of them are needed. Size 1 is last, since it waits for the job before.
    std::size_t usable = 1;
    for (std::size_t from = count; from-- > 0;) {
      while (usable < sizes.size() && from + static_cast<std::size_t>(sizes[usable]) <= count) ++usable;
      double even = kNever;
      double odd = kNever;
      std::size_t k = 1;
      for (; k + 1 < usable; k += 2) {
        odd = std::min(seconds(from, k), odd);
        even = std::min(seconds(from, k + 1), even);
      }
      if (k < usable) odd = std::min(seconds(from, k), odd);
      rest_[from] = std::min(seconds(from, 0), std::min(odd, even));
    }
    for (std::size_t from = 0;;) {
      std::size_t k = sizes.size();
      do {
        --k;
      } while (k > 0 && (from + static_cast<std::size_t>(sizes[k]) > count || seconds(from, k) > rest_[from]));
      const std::size_t end = from + static_cast<std::size_t>(sizes[k]);
      if (end > place) return {from, end};
      from = end;
    }
  }

 private:
  std::vector<double> rest_;     // the least seconds of the jobs from there on
  std::vector<double> numbers_;  // the sizes
};

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include "balance/size_history.hpp"

#include <algorithm>
#include <utility>

#include "balance/bounded.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kSharesKept = 256;  // of one device: batches of any length have any number of them
constexpr std::size_t kFirstRunsKept = 5;

}  // namespace

double seconds_of(const StepTimings& timings) {
  if (timings.step_seconds > 0.0) return timings.step_seconds;
  double longest = 0.0;
  for (const auto& device : timings.devices) {
    double sum = 0.0;
    for (const MicroBatchTiming& timing : device) sum += timing.seconds;
    longest = std::max(longest, sum);
  }
  return longest;
}

bool any_excluded(const StepTimings& timings) {
  return std::any_of(timings.devices.begin(), timings.devices.end(), [](const auto& device) {
    return std::any_of(device.begin(), device.end(), [](const MicroBatchTiming& timing) { return timing.excluded; });
  });
}

SizeHistory::SizeHistory(std::vector<std::size_t> class_of)
    : class_of_(std::move(class_of)), largest_(class_of_.size(), 0), ran_(class_of_.size()) {}

void SizeHistory::record(const std::vector<std::int64_t>& shares, const StepTimings& timings) {
  if (is_new(shares)) {
    keep_last(first_runs_, {shares, any_excluded(timings) ? seconds_of(timings) : 0.0}, kFirstRunsKept);
  }
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) continue;
    std::int64_t& largest = largest_[class_of_[i]];
    largest = std::max(largest, shares[i]);
    if (!has_run(i, shares[i])) keep_last(ran_[i], shares[i], kSharesKept);
  }
}

bool SizeHistory::is_new(const std::vector<std::int64_t>& shares) const {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] > 0 && !has_run(i, shares[i])) return true;
  }
  return false;
}

bool SizeHistory::has_run(std::size_t device, std::int64_t share) const {
  return std::ranges::find(ran_[device], share) != ran_[device].end();
}

double SizeHistory::first_run_seconds(
    const std::function<double(const std::vector<std::int64_t>& shares)>& makespan) const {
  std::vector<double> costs;
  for (const FirstRun& run : first_runs_) {
    costs.push_back(run.seconds > 0.0 ? std::max(0.0, run.seconds - makespan(run.shares)) : 0.0);
  }
  return plan::median_in_place(costs);
}

}  // namespace paceline::balance

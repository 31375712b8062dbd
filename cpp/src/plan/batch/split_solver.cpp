// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "plan/batch/greedy_fill.hpp"
#include "plan/batch/split_problem.hpp"
#include "plan/numbers.hpp"

namespace paceline::plan {
namespace {

// With more devices the sums for all numbers of changes and workers would cost more than the split is worth. With
// reduction costs the previous shares are then kept as a whole or not considered.
constexpr std::int64_t kChangeDevices = 16;

class Solver {
 public:
  explicit Solver(const SplitProblem& problem) : problem_(problem) {}

  bool solve(Split& split) {
    // The whole grains alone. Their finish is a lower bound: gaps, the remainder and reductions only add to it.
    bool gaps = false;
    for (const RoleRanges& candidate : problem_.candidates) {
      GrainRange range = candidate.in(Role::work);
      gaps = gaps || (candidate.may_idle() && range.low > 1);
      if (candidate.may_idle() || problem_.has_remainder)
        range = {range.cost, 0, std::max<std::int64_t>(range.high, 0)};
      ranges_.push_back(range);
    }
    double makespan = fill(ranges_, grains_);
    if (makespan == kInfinity) return false;
    // If every device can take any number of grains between two bounds, and nothing else counts, this filling is the
    // answer. Start-up and fixed costs are no obstacle: a cost that is 0 without work and jumps at the first grain is
    // nondecreasing.
    const bool plain = !problem_.has_remainder && !counts_workers_ && !gaps;
    if (!plain && !find_makespan(makespan, makespan)) return false;
    if (!plain || problem_.has_previous || has_tied_idle(makespan)) settle(makespan);
    split.makespan_seconds = makespan;
    for (std::size_t i = 0; i < grains_.size(); ++i) split.shares.push_back(ranges_[i].cost.items(grains_[i]));
    return true;
  }

 private:
  // Fills the devices. Returns when the last one finishes, infinity if the batch is not within the ranges.
  double fill(std::span<const GrainRange> ranges, std::vector<std::int64_t>& grains) const {
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (const GrainRange& range : ranges) {
      if (range.empty()) return kInfinity;
      low += range.low;
      high += range.high;
    }
    if (low > problem_.grains || high < problem_.grains) return kInfinity;
    grains.resize(ranges.size());
    fill_greedily(ranges, problem_.grains, grains);
    double finish = 0.0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const GrainCost& cost = ranges[i].cost;
      if (cost.items(grains[i]) > 0) finish = std::max(finish, cost.seconds(grains[i]));
    }
    return finish;
  }

  // Whether a device is idle that could work at the same makespan. The order of preference wants it to work.
  [[nodiscard]] bool has_tied_idle(double makespan) const {
    for (std::size_t i = 0; i < grains_.size(); ++i) {
      if (grains_[i] == 0 && ranges_[i].high > 0 && ranges_[i].cost.seconds(1) <= makespan) return true;
    }
    return false;
  }

  // What so many working devices add to a makespan; any number of them: nothing.
  [[nodiscard]] double reduction(std::int64_t workers) const {
    return workers < 0 ? 0.0 : problem_.reduction_seconds[static_cast<std::size_t>(workers)];
  }

  bool fits(double budget, std::int64_t workers, double& makespan) {
    std::optional<RolePlan> plan = find_roles(problem_, {budget, workers, reduction(workers)});
    if (!plan) return false;
    ranges_ = std::move(plan->ranges);
    makespan = fill(ranges_, grains_) + reduction(workers);
    return true;
  }

  // Lowers `makespan` to the least one of a number of workers, exact to the last bit; false if none is lower. Each
  // success lowers the upper end to a makespan that a split has. The search ends when the next double below it is
  // refused.
  bool lower(std::int64_t workers, double bound, double& makespan) {
    const double limit = makespan == kInfinity ? kInfinity : std::nextafter(makespan, -kInfinity);
    const double least = bound + reduction(workers);
    if (!(least < limit && fits(least, workers, makespan)) && !fits(limit, workers, makespan)) return false;
    double below = std::nextafter(least, -kInfinity);
    for (bool halve = false; below < std::nextafter(makespan, -kInfinity); halve = !halve) {
      const double probe = halve ? below + (makespan - below) / 2 : std::nextafter(makespan, -kInfinity);
      if (!fits(probe, workers, makespan)) below = probe;
    }
    return true;
  }

  bool find_makespan(double bound, double& makespan) {
    makespan = kInfinity;
    if (!counts_workers_) return lower(-1, bound, makespan);
    for (std::int64_t workers = std::ssize(grains_); workers > 0; --workers) lower(workers, bound, makespan);
    return makespan < kInfinity;
  }

  // Of all splits with this makespan, the first in the order of preference.
  void settle(double makespan) {
    const std::int64_t size = std::ssize(grains_);
    std::optional<RolePlan> best;
    if (problem_.has_previous) best = best_roles(makespan, counts_workers_ && size > kChangeDevices ? 0 : size);
    if (!best) best = best_roles(makespan, -1);
    if (!best) return;  // out of steps beyond kExactDevices: the split that gave the makespan stays
    ranges_ = std::move(best->ranges);
    fill(ranges_, grains_);
  }

  [[nodiscard]] std::optional<RolePlan> best_roles(double makespan, std::int64_t most_changes) const {
    std::optional<RolePlan> best;
    const std::int64_t most = counts_workers_ ? std::ssize(grains_) : -1;
    for (std::int64_t workers = counts_workers_ ? 1 : -1; workers <= most; ++workers) {
      std::optional<RolePlan> plan = find_roles(problem_, {makespan, workers, reduction(workers), most_changes});
      if (plan && (!best || plan->better_than(*best))) best = std::move(plan);
    }
    return best;
  }

  const SplitProblem& problem_;
  const bool counts_workers_ = !problem_.reduction_seconds.empty();
  std::vector<std::int64_t> grains_;
  std::vector<GrainRange> ranges_;
};

}  // namespace

bool solve(const SplitProblem& problem, Split& split) { return Solver(problem).solve(split); }

}  // namespace paceline::plan

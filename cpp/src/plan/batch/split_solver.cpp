// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>

#include "plan/batch/greedy_fill.hpp"
#include "plan/batch/split_problem.hpp"
#include "plan/numbers.hpp"

namespace paceline::plan {
namespace {

// With more devices the sums for all numbers of changes and workers would cost more than the split is worth. With
// reduction costs the previous shares are then kept as a whole or not considered.
constexpr std::int64_t kChangeDevices = 16;

// The largest double t >= 0 with t + reduction <= total in floating point, or a negative number if there is none. It
// bisects the bits, because doubles that are not negative are ordered like their representations.
double budget_before_reduction(double total, double reduction) {
  if (reduction == 0.0) return total;
  if (!(reduction <= total)) return -1.0;
  std::uint64_t low = 0;
  std::uint64_t high = std::bit_cast<std::uint64_t>(total) + 1;
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (std::bit_cast<double>(middle) + reduction <= total ? low : high) = middle;
  }
  return std::bit_cast<double>(low);
}

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

  bool fits(double budget, std::int64_t workers, double& finish) {
    std::optional<RolePlan> plan = find_roles(problem_, {.budget_seconds = budget, .working_devices = workers});
    if (!plan) return false;
    ranges_ = std::move(plan->ranges);
    finish = fill(ranges_, grains_);
    return true;
  }

  // The least finish within `budget` for one number of workers, exact to the last bit. Each success lowers the upper
  // end to a finish that a split has. The search ends when the next double below it is refused. `guess` is tried first.
  bool find_finish(double budget, std::int64_t workers, double bound, double guess, double& finish) {
    if (!(guess < budget && fits(guess, workers, finish)) && !fits(budget, workers, finish)) return false;
    double below = std::nextafter(bound, -kInfinity);
    for (bool halve = false; below < std::nextafter(finish, -kInfinity); halve = !halve) {
      const double probe = halve ? below + (finish - below) / 2 : std::nextafter(finish, -kInfinity);
      if (!fits(probe, workers, finish)) below = probe;
    }
    return true;
  }

  bool find_makespan(double bound, double& makespan) {
    if (!counts_workers_) return find_finish(kInfinity, -1, bound, bound, makespan);
    // A guess tells which numbers of workers to look at first: those devices work that can do most by the bound.
    std::vector<GrainRange> best;
    for (const RoleRanges& candidate : problem_.candidates) {
      const GrainRange& work = candidate.in(Role::work);
      if (work.high > 0) best.push_back({work.cost, 1, work.high});
    }
    std::stable_sort(best.begin(), best.end(), [&](const GrainRange& a, const GrainRange& b) {
      return a.cost.within(bound, 0, a.high) > b.cost.within(bound, 0, b.high);
    });
    std::vector<std::tuple<double, double, std::size_t>> attempts;  // guess with reduction, guess, workers
    std::vector<std::int64_t> grains;
    for (std::size_t workers = 1; workers <= grains_.size(); ++workers) {
      const double guess = workers <= best.size() ? fill({best.data(), workers}, grains) : kInfinity;
      attempts.emplace_back(guess + problem_.reduction_seconds[workers], guess, workers);
    }
    std::sort(attempts.begin(), attempts.end());
    makespan = kInfinity;
    for (const auto& [total, guess, workers] : attempts) {
      const double reduction = problem_.reduction_seconds[workers];
      const double budget = budget_before_reduction(std::nextafter(makespan, -kInfinity), reduction);
      double finish = 0.0;
      if (budget < bound || !find_finish(budget, static_cast<std::int64_t>(workers), bound, guess, finish)) continue;
      makespan = finish + reduction;
    }
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
    if (!counts_workers_) return find_roles(problem_, {.budget_seconds = makespan, .most_changes = most_changes});
    std::optional<RolePlan> best;
    for (std::size_t workers = 1; workers <= grains_.size(); ++workers) {
      const double budget = budget_before_reduction(makespan, problem_.reduction_seconds[workers]);
      if (budget < 0.0) continue;
      std::optional<RolePlan> plan = find_roles(problem_, {budget, static_cast<std::int64_t>(workers), most_changes});
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

// SPDX-License-Identifier: Apache-2.0
#include "plan/batch/split_solver.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "plan/batch/greedy_fill.hpp"

namespace paceline::plan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
  explicit Solver(const SplitProblem& problem) : problem_(problem), grains_(problem.candidates.size()) {}

  bool solve(Split& split) {
    double makespan = kInfinity;
    bool settled = false;
    if (is_plain()) {
      if (!fill_plain()) return false;
      makespan = finish_seconds();
      settled = !problem_.has_previous && !has_tied_idle(makespan);
    } else if (!find_makespan(makespan)) {
      return false;
    }
    split.makespan_seconds = makespan;
    if (problem_.has_previous && previous_is_optimal(makespan)) {
      for (const Candidate& candidate : problem_.candidates) split.shares.push_back(candidate.previous);
      return true;
    }
    if (!settled) settle(makespan);
    for (std::size_t i = 0; i < grains_.size(); ++i) {
      const std::int64_t rest = carries(i) ? problem_.remainder : 0;
      split.shares.push_back(grains_[i] * problem_.granularity + rest);
    }
    return true;
  }

 private:
  // If every device can take any number of grains between two bounds, and nothing else counts, one filling is the
  // answer. Start-up and fixed costs are no obstacle: a cost that is 0 without work and jumps at the first grain is
  // nondecreasing.
  [[nodiscard]] bool is_plain() const {
    return problem_.remainder == 0 && problem_.reduction_seconds.empty() &&
           std::none_of(problem_.candidates.begin(), problem_.candidates.end(),
                        [](const Candidate& c) { return c.has_gap(); });
  }

  bool fill_plain() {
    ranges_.clear();
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (const Candidate& candidate : problem_.candidates) {
      GrainRange range = candidate.work;
      if (candidate.may_idle) {
        range.low = 0;
        range.high = std::max<std::int64_t>(range.high, 0);
      }
      if (range.low > range.high) return false;
      low += range.low;
      high += range.high;
      ranges_.push_back(range);
    }
    if (low > problem_.grains || high < problem_.grains) return false;
    fill_greedily(ranges_, problem_.grains, grains_);
    return true;
  }

  [[nodiscard]] bool carries(std::size_t i) const { return !plan_.roles.empty() && role_carries(i); }
  [[nodiscard]] bool role_carries(std::size_t i) const {
    if (plan_.roles[i] == Role::keep) return problem_.candidates[i].previous % problem_.granularity != 0;
    return plan_.roles[i] == Role::carry;
  }

  [[nodiscard]] double finish_seconds() const {
    double finish = 0.0;
    for (std::size_t i = 0; i < grains_.size(); ++i) {
      if (grains_[i] > 0 || carries(i)) finish = std::max(finish, ranges_[i].cost.seconds(grains_[i]));
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

  // Fills the devices of a plan of roles. Returns when the last one finishes.
  double fill_plan() {
    ranges_ = plan_.ranges;
    fill_greedily(ranges_, problem_.grains, grains_);
    return finish_seconds();
  }

  bool fits(double budget, std::int64_t workers, double& finish) {
    if (!find_roles(problem_, {.budget_seconds = budget, .working_devices = workers, .prefer_previous = false}, plan_))
      return false;
    finish = fill_plan();
    return true;
  }

  // A lower bound: the whole grains alone, spread freely. Gaps, the remainder and reductions only add to it.
  double relaxed_makespan() {
    ranges_.clear();
    std::int64_t high = 0;
    for (const Candidate& candidate : problem_.candidates) {
      ranges_.push_back({candidate.work.cost, 0, std::max<std::int64_t>(candidate.work.high, 0)});
      high += ranges_.back().high;
    }
    if (high < problem_.grains) return 0.0;  // the carrier's last grain is needed, too
    plan_.roles.clear();
    fill_greedily(ranges_, problem_.grains, grains_);
    return finish_seconds();
  }

  // The least finish within `budget` for one number of workers, exact to the last bit. Each success lowers the upper
  // end to a finish that a split has. The search ends when the next double below it is refused. `guess` is tried first.
  bool find_finish(double budget, std::int64_t workers, double bound, double guess, double& finish) {
    if (!(guess < budget && fits(guess, workers, finish)) && !fits(budget, workers, finish)) return false;
    double below = bound;
    if (below >= finish || fits(below, workers, finish)) return true;
    for (double found = 0.0; finish > 0.0 && fits(std::nextafter(finish, 0.0), workers, found);) {
      finish = found;
      while (finish - below > 1e-9 * finish) {
        const double middle = below + (finish - below) / 2;
        if (fits(middle, workers, found)) {
          finish = found;
        } else {
          below = middle;
        }
      }
    }
    return true;
  }

  // When a good choice of `workers` devices would finish if only their maximums counted. It is a first guess, and it
  // tells which numbers of workers to look at first.
  double guess_finish(std::int64_t workers) {
    double finish = kInfinity;
    std::vector<GrainRange> all;
    for (const Candidate& candidate : problem_.candidates) {
      if (candidate.work.high > 0) all.push_back({candidate.work.cost, 0, candidate.work.high});
    }
    const auto count = static_cast<std::size_t>(workers);
    if (all.size() < count) return finish;
    double level = 0.0;  // devices are chosen by an even share first, then by what each can finish by this level
    for (int round = 0; round < 2; ++round) {
      const auto rank = [&](const GrainRange& bounded) {
        if (round == 0) return -bounded.cost.seconds(std::min(bounded.high, problem_.grains / workers + 1));
        return static_cast<double>(bounded.cost.within(level, 0, bounded.high));
      };
      std::stable_sort(all.begin(), all.end(),
                       [&](const GrainRange& a, const GrainRange& b) { return rank(a) > rank(b); });
      std::vector<GrainRange> chosen(all.begin(), all.begin() + workers);
      std::int64_t high = 0;
      for (GrainRange& bounded : chosen) {
        bounded.low = 1;
        high += bounded.high;
      }
      if (workers > problem_.grains || high < problem_.grains) return finish;
      std::vector<std::int64_t> grains(count);
      fill_greedily(chosen, problem_.grains, grains);
      level = 0.0;
      for (std::size_t i = 0; i < count; ++i) level = std::max(level, chosen[i].cost.seconds(grains[i]));
      finish = std::min(finish, level);
    }
    return finish;
  }

  bool find_makespan(double& makespan) {
    const double bound = relaxed_makespan();
    double finish = 0.0;
    if (problem_.reduction_seconds.empty()) {
      if (!find_finish(kInfinity, -1, bound, kInfinity, finish)) return false;
      makespan = finish;
      return true;
    }
    struct Attempt {
      std::int64_t workers;
      double reduction;
      double guess;
    };
    std::vector<Attempt> attempts;
    for (std::int64_t workers = static_cast<std::int64_t>(grains_.size()); workers > 0; --workers) {
      attempts.push_back(
          {workers, problem_.reduction_seconds[static_cast<std::size_t>(workers)], guess_finish(workers)});
    }
    std::stable_sort(attempts.begin(), attempts.end(),
                     [](const Attempt& a, const Attempt& b) { return a.guess + a.reduction < b.guess + b.reduction; });
    bool found = false;
    for (const Attempt& attempt : attempts) {
      const double better = found ? std::nextafter(makespan, -kInfinity) : kInfinity;
      const double budget = found ? budget_before_reduction(better, attempt.reduction) : kInfinity;
      if (budget < bound || !find_finish(budget, attempt.workers, bound, attempt.guess, finish)) continue;
      makespan = finish + attempt.reduction;
      found = true;
    }
    return found;
  }

  [[nodiscard]] bool previous_is_optimal(double makespan) const {
    std::int64_t sum = 0;
    std::int64_t carriers = 0;
    std::size_t workers = 0;
    double finish = 0.0;
    for (const Candidate& candidate : problem_.candidates) {
      sum += candidate.previous;
      if (candidate.previous == 0) {
        if (!candidate.may_idle) return false;
        continue;
      }
      const std::int64_t grains = candidate.previous / problem_.granularity;
      const std::int64_t rest = candidate.previous % problem_.granularity;
      if (rest != 0 && rest != problem_.remainder) return false;
      const GrainRange& range = rest == 0 ? candidate.work : candidate.carry;
      if (grains < range.low || grains > range.high) return false;
      carriers += rest != 0 ? 1 : 0;
      workers += 1;
      finish = std::max(finish, range.cost.seconds(grains));
    }
    if (sum != problem_.batch() || carriers != (problem_.remainder > 0 ? 1 : 0)) return false;
    if (!problem_.reduction_seconds.empty()) finish += problem_.reduction_seconds[workers];
    return finish <= makespan;
  }

  // Of all splits with this makespan, the first in the order of preference.
  void settle(double makespan) {
    const bool counts = !problem_.reduction_seconds.empty();
    const bool prefer = problem_.has_previous && (!counts || grains_.size() <= kChangeTableDevices);
    const std::int64_t most = counts ? static_cast<std::int64_t>(grains_.size()) : 1;
    RolePlan best;
    bool found = false;
    for (std::int64_t workers = 1; workers <= most; ++workers) {
      const double reduction = counts ? problem_.reduction_seconds[static_cast<std::size_t>(workers)] : 0.0;
      const RoleQuery query{.budget_seconds = budget_before_reduction(makespan, reduction),
                            .working_devices = counts ? workers : -1,
                            .prefer_previous = prefer};
      if (query.budget_seconds < 0.0 || !find_roles(problem_, query, plan_)) continue;
      if (!found || plan_.better_than(best)) best = plan_;
      found = true;
    }
    if (!found) return;  // out of steps, with more than kExactDevices devices: the split that gave the makespan stays
    plan_ = std::move(best);
    fill_plan();
  }

  const SplitProblem& problem_;
  std::vector<std::int64_t> grains_;
  std::vector<GrainRange> ranges_;
  RolePlan plan_;
};

}  // namespace

bool solve(const SplitProblem& problem, Split& split) {
  split.shares.reserve(problem.candidates.size());
  return Solver(problem).solve(split);
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include "plan/batch/role_search.hpp"

#include <algorithm>
#include <array>
#include <limits>

namespace paceline::plan {
namespace {

constexpr std::int64_t kImpossible = std::numeric_limits<std::int64_t>::max();

struct Option {
  Role role = Role::idle;
  bool works = false;
  bool carries = false;
  bool changes = false;
  GrainRange range;
};

struct Options {
  std::array<Option, 4> items;
  std::size_t count = 0;
  void add(const Option& option) { items[count++] = option; }
};

struct Sums {
  std::int64_t low = kImpossible;
  std::int64_t high = -1;
};

// Cuts the range at the budget. Returns false if nothing is left of it.
bool cut(const GrainRange& bounded, double budget, GrainRange& result) {
  if (bounded.low > bounded.high) return false;
  result = bounded;
  result.high = bounded.cost.within(budget, bounded.low, bounded.high);
  return result.low <= result.high;
}

bool keep_option(const SplitProblem& problem, const Candidate& candidate, double budget, Option& option) {
  const std::int64_t grains = candidate.previous / problem.granularity;
  const std::int64_t rest = candidate.previous % problem.granularity;
  option = {.role = Role::keep, .works = candidate.previous > 0, .carries = rest > 0, .changes = false, .range = {}};
  if (candidate.previous == 0) return candidate.may_idle;
  if (rest != 0 && rest != problem.remainder) return false;
  const GrainRange& range = rest == 0 ? candidate.work : candidate.carry;
  if (grains < range.low || grains > range.high || !(range.cost.seconds(grains) <= budget)) return false;
  option.range = {range.cost, grains, grains};
  return true;
}

Options options_of(const SplitProblem& problem, const Candidate& candidate, const RoleQuery& query) {
  Options options;
  Option option;
  const bool counted = query.prefer_previous;
  GrainRange range;
  if (problem.remainder > 0 && cut(candidate.carry, query.budget_seconds, range)) {
    options.add({Role::carry, true, true, counted, range});
  }
  if (cut(candidate.work, query.budget_seconds, range)) options.add({Role::work, true, false, counted, range});
  if (candidate.may_idle) options.add({Role::idle, false, false, counted, {}});
  if (counted && keep_option(problem, candidate, query.budget_seconds, option)) options.add(option);
  return options;
}

class Search {
 public:
  Search(const SplitProblem& problem, const RoleQuery& query)
      : problem_(problem),
        size_(problem.candidates.size()),
        change_limit_(query.prefer_previous ? static_cast<std::int64_t>(size_) : 0),
        counts_workers_(query.working_devices >= 0),
        worker_limit_(counts_workers_ ? query.working_devices : 0),
        carriers_(problem.remainder > 0 ? 1 : 0) {
    options_.reserve(size_);
    for (const Candidate& candidate : problem.candidates) options_.push_back(options_of(problem, candidate, query));
    chosen_.resize(size_);
    tabulate();
  }

  bool run(RolePlan& plan) {
    for (std::int64_t changes = 0; changes <= change_limit_; ++changes) {
      if (!descend(0, changes, worker_limit_, carriers_, 0, 0)) continue;
      plan.changes = changes;
      plan.roles.resize(size_);
      plan.ranges.resize(size_);
      for (std::size_t i = 0; i < size_; ++i) {
        plan.roles[i] = chosen_[i]->role;
        plan.ranges[i] = chosen_[i]->range;
      }
      return true;
    }
    return false;
  }

 private:
  [[nodiscard]] std::size_t index(std::size_t device, std::int64_t changes, std::int64_t workers,
                                  std::int64_t carriers) const {
    const auto change_states = static_cast<std::size_t>(change_limit_ + 1);
    const auto worker_states = static_cast<std::size_t>(worker_limit_ + 1);
    return ((device * change_states + static_cast<std::size_t>(changes)) * worker_states +
            static_cast<std::size_t>(workers)) *
               2 +
           static_cast<std::size_t>(carriers);
  }

  // Takes what the option needs from the allowances. Returns false if it needs more than there is.
  bool spend(const Option& option, std::int64_t& changes, std::int64_t& workers, std::int64_t& carriers) const {
    changes -= option.changes ? 1 : 0;
    carriers -= option.carries ? 1 : 0;
    if (counts_workers_) workers -= option.works ? 1 : 0;
    return changes >= 0 && workers >= 0 && carriers >= 0;
  }

  // sums_[device, c, w, r]: the least and the most grains that the devices from `device` on can take, with at most c
  // changes, if exactly w of them work and r carry the remainder.
  void tabulate() {
    sums_.resize(index(size_, change_limit_, worker_limit_, 1) + 1);
    for (std::int64_t c = 0; c <= change_limit_; ++c) sums_[index(size_, c, 0, 0)] = {0, 0};
    for (std::size_t device = size_; device-- > 0;) {
      for (std::int64_t c = 0; c <= change_limit_; ++c) {
        for (std::int64_t w = 0; w <= worker_limit_; ++w) {
          for (std::int64_t r = 0; r <= carriers_; ++r) sums_[index(device, c, w, r)] = sums_with(device, c, w, r);
        }
      }
    }
  }

  Sums sums_with(std::size_t device, std::int64_t changes, std::int64_t workers, std::int64_t carriers) const {
    Sums result;
    const Options& options = options_[device];
    for (std::size_t i = 0; i < options.count; ++i) {
      const Option& option = options.items[i];
      std::int64_t c = changes;
      std::int64_t w = workers;
      std::int64_t r = carriers;
      if (!spend(option, c, w, r)) continue;
      const Sums& rest = sums_[index(device + 1, c, w, r)];
      if (rest.low > rest.high) continue;
      result.low = std::min(result.low, option.range.low + rest.low);
      result.high = std::max(result.high, option.range.high + rest.high);
    }
    return result;
  }

  bool descend(std::size_t device, std::int64_t changes, std::int64_t workers, std::int64_t carriers, std::int64_t low,
               std::int64_t high) {
    const Sums& rest = sums_[index(device, changes, workers, carriers)];
    if (rest.low > rest.high || low + rest.low > problem_.grains || high + rest.high < problem_.grains) return false;
    if (device == size_) return true;
    if (size_ > kExactDevices && ++steps_ > kStepLimit) return false;
    const Options& options = options_[device];
    for (std::size_t i = 0; i < options.count; ++i) {
      const Option& option = options.items[i];
      std::int64_t c = changes;
      std::int64_t w = workers;
      std::int64_t r = carriers;
      if (!spend(option, c, w, r)) continue;
      chosen_[device] = &option;
      if (descend(device + 1, c, w, r, low + option.range.low, high + option.range.high)) return true;
    }
    return false;
  }

  const SplitProblem& problem_;
  const std::size_t size_;
  const std::int64_t change_limit_;
  const bool counts_workers_;
  const std::int64_t worker_limit_;
  const std::int64_t carriers_;
  std::vector<Options> options_;
  std::vector<const Option*> chosen_;
  std::vector<Sums> sums_;
  std::int64_t steps_ = 0;
};

}  // namespace

bool find_roles(const SplitProblem& problem, const RoleQuery& query, RolePlan& plan) {
  return Search(problem, query).run(plan);
}

}  // namespace paceline::plan

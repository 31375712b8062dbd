// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "plan/batch/split_problem.hpp"

namespace paceline::plan {
namespace {

constexpr std::int64_t kStepLimit = 1 << 16;

/// How many of the remaining devices change, work and carry the remainder: at most so many changes, else exactly so
/// many.
struct Allowance {
  std::int64_t changes = 0;
  std::int64_t workers = 0;
  std::int64_t carriers = 0;
};

struct Sums {
  bool known = false;
  std::int64_t low = std::numeric_limits<std::int64_t>::max();
  std::int64_t high = -1;
};

class RoleSearch {
 public:
  RoleSearch(const SplitProblem& problem, const RoleQuery& query)
      : problem_(problem),
        size_(problem.candidates.size()),
        counts_changes_(query.most_changes >= 0),
        counts_workers_(query.working_devices >= 0),
        all_{.changes = std::max<std::int64_t>(query.most_changes, 0),
             .workers = std::max<std::int64_t>(query.working_devices, 0),
             .carriers = problem.has_remainder ? 1 : 0},
        candidates_(problem.candidates),
        roles_(size_),
        sums_(index(size_, all_) + 1) {
    for (RoleRanges& candidate : candidates_) {
      if (!counts_changes_) candidate.in(Role::keep) = {};
      for (GrainRange& range : candidate) {
        if (range.empty()) continue;
        range.high = range.cost.then(query.reduction_seconds).within(query.budget_seconds, range.low, range.high);
      }
    }
  }

  std::optional<RolePlan> run() {
    for (Allowance left{0, all_.workers, all_.carriers}; left.changes <= all_.changes; ++left.changes) {
      if (!descend(0, left, 0, 0)) continue;
      RolePlan plan{left.changes, roles_, {}};
      for (std::size_t i = 0; i < size_; ++i) plan.ranges.push_back(candidates_[i].in(roles_[i]));
      return plan;
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] std::size_t index(std::size_t device, const Allowance& left) const {
    const std::size_t with_changes =
        device * static_cast<std::size_t>(all_.changes + 1) + static_cast<std::size_t>(left.changes);
    const std::size_t with_workers =
        with_changes * static_cast<std::size_t>(all_.workers + 1) + static_cast<std::size_t>(left.workers);
    return with_workers * 2 + static_cast<std::size_t>(left.carriers);
  }

  /// Calls visit(role, range, what is left for the others) for each role that the device may take, in order of
  /// preference, until one call returns true.
  template <class Visit>
  bool any_role(std::size_t device, const Allowance& left, const Visit& visit) const {
    for (const Role role : {Role::carry, Role::work, Role::idle, Role::keep}) {
      const GrainRange& range = candidates_[device].in(role);
      if (range.empty()) continue;
      Allowance rest = left;
      rest.changes -= counts_changes_ && role != Role::keep ? 1 : 0;
      rest.workers -= counts_workers_ && range.cost.items(range.high) > 0 ? 1 : 0;
      rest.carriers -= range.cost.items(0) > 0 ? 1 : 0;
      if (rest.changes < 0 || rest.workers < 0 || rest.carriers < 0) continue;
      if (visit(role, range, rest)) return true;
    }
    return false;
  }

  /// The least and the most grains that the devices from `device` on can take. Most of these sums are never asked for.
  const Sums& sums(std::size_t device, const Allowance& left) {
    Sums& result = sums_[index(device, left)];
    if (result.known) return result;
    result.known = true;
    if (device == size_) {
      if (left.workers == 0 && left.carriers == 0) result = {true, 0, 0};
      return result;
    }
    any_role(device, left, [&](Role, const GrainRange& range, const Allowance& others) {
      const Sums& rest = sums(device + 1, others);
      if (rest.low > rest.high) return false;
      result.low = std::min(result.low, range.low + rest.low);
      result.high = std::max(result.high, range.high + rest.high);
      return false;
    });
    return result;
  }

  bool descend(std::size_t device, const Allowance& left, std::int64_t low, std::int64_t high) {
    const Sums& rest = sums(device, left);
    if (rest.low > rest.high || low + rest.low > problem_.grains || high + rest.high < problem_.grains) return false;
    if (device == size_) return true;
    if (size_ > kExactDevices && ++steps_ > kStepLimit) return false;
    return any_role(device, left, [&](Role role, const GrainRange& range, const Allowance& others) {
      roles_[device] = role;
      return descend(device + 1, others, low + range.low, high + range.high);
    });
  }

  const SplitProblem& problem_;
  const std::size_t size_;
  const bool counts_changes_;
  const bool counts_workers_;
  const Allowance all_;
  std::vector<RoleRanges> candidates_;  // cut at the budget
  std::vector<Role> roles_;
  std::vector<Sums> sums_;  // by device and allowance
  std::int64_t steps_ = 0;
};

}  // namespace

std::optional<RolePlan> find_roles(const SplitProblem& problem, const RoleQuery& query) {
  return RoleSearch(problem, query).run();
}

}  // namespace paceline::plan

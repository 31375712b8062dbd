// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <paceline/plan/split.hpp>

#include "plan/batch/grain_range.hpp"

namespace paceline::plan {

/// What one device does in a split. The order is the order of preference between otherwise equal splits.
enum class Role : std::uint8_t {
  carry,  ///< has work that is not a multiple of the granularity: the one share with the remainder
  work,   ///< has a multiple of the granularity, not zero
  idle,   ///< has nothing
  keep,   ///< has what it had before, whatever that is
};

/// The grains of one device in each role. A device cannot take a role whose range is empty.
struct RoleRanges : std::array<GrainRange, 4> {
  [[nodiscard]] const GrainRange& in(Role role) const { return (*this)[static_cast<std::size_t>(role)]; }
  [[nodiscard]] GrainRange& in(Role role) { return (*this)[static_cast<std::size_t>(role)]; }
  [[nodiscard]] bool may_idle() const { return !in(Role::idle).empty(); }
};

/// split_batch's problem after validation: integers in grains.
struct SplitProblem {
  std::vector<RoleRanges> candidates;
  std::int64_t grains = 0;  ///< batch / granularity
  bool has_remainder = false;
  bool has_previous = false;
  std::span<const double> reduction_seconds;  ///< by number of working devices, or empty
};

/// A role for each device, and the ranges of these roles. The batch fits into the ranges.
struct RolePlan {
  std::int64_t changes = 0;
  std::vector<Role> roles;
  std::vector<GrainRange> ranges;

  /// Fewer changes first, then the preferred role on the lowest-numbered device where two plans differ.
  [[nodiscard]] bool better_than(const RolePlan& other) const {
    return changes != other.changes ? changes < other.changes : roles < other.roles;
  }
};

/// What find_roles() searches for.
struct RoleQuery {
  double budget_seconds = 0.0;        ///< every device finishes by then, with the reduction
  std::int64_t working_devices = -1;  ///< exactly so many have work; -1: any number
  double reduction_seconds = 0.0;     ///< after a device's work
  std::int64_t most_changes = -1;     ///< from the previous shares, as few as possible; -1: these do not count
};

inline constexpr std::size_t kExactDevices = 8;

/// Finds the best plan of roles under the query. Returns none if none fits.
///
/// The search goes depth first over the devices, in order of preference. For each number of changes, workers and
/// carriers it knows the least and the most grains that the remaining devices can take, and prunes by these sums. If no
/// device has a gap, the sums have no holes and the search never goes back. With gaps it enumerates subsets: all of
/// them up to kExactDevices devices, and a limited number of steps beyond.
[[nodiscard]] std::optional<RolePlan> find_roles(const SplitProblem& problem, const RoleQuery& query);

/// Solves a validated problem with at least one item; false if no split respects the limits.
[[nodiscard]] bool solve(const SplitProblem& problem, Split& split);

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/batch/grain_range.hpp"

namespace paceline::plan {

/// What one device does in a split. The order is the order of preference between otherwise equal splits.
enum class Role : std::uint8_t {
  carry,  ///< has work that is not a multiple of the granularity: the one share with the remainder
  work,   ///< has a multiple of the granularity, not zero
  idle,   ///< has nothing
  keep,   ///< has what it had before, whatever that is
};

/// One device of a problem in grains. It cannot take a role whose range has low > high.
struct Candidate {
  GrainRange work;   ///< grains * granularity items; low >= 1
  GrainRange carry;  ///< grains * granularity + remainder items
  bool may_idle = true;
  std::int64_t previous = 0;  ///< items, whatever they were
  /// Whether it may have no work, or a share above some minimum, but nothing in between.
  [[nodiscard]] bool has_gap() const { return may_idle && work.low > 1; }
};

/// split_batch's problem after validation: integers in grains.
struct SplitProblem {
  std::vector<Candidate> candidates;
  std::int64_t grains = 0;     ///< batch / granularity
  std::int64_t remainder = 0;  ///< batch % granularity
  std::int64_t granularity = 1;
  bool has_previous = false;
  std::span<const double> reduction_seconds;  ///< by number of working devices, or empty

  [[nodiscard]] std::int64_t batch() const { return grains * granularity + remainder; }
};

/// A role for each device, and the ranges of these roles. The batch fits into the ranges.
struct RolePlan {
  std::int64_t changes = 0;
  std::vector<Role> roles;
  std::vector<GrainRange> ranges;  ///< per device; low == high if there is nothing to choose

  /// Fewer changes first, then the preferred role on the lowest-numbered device where two plans differ.
  [[nodiscard]] bool better_than(const RolePlan& other) const {
    if (changes != other.changes) return changes < other.changes;
    return roles < other.roles;
  }
};

/// What find_roles() searches for.
struct RoleQuery {
  double budget_seconds = 0.0;        ///< every device finishes by then, reduction not counted
  std::int64_t working_devices = -1;  ///< exactly so many have work; -1: any number
  bool prefer_previous = false;       ///< fewest changes from the previous shares
};

/// Finds the best plan of roles under the query. Returns false if none fits.
///
/// The search goes depth first over the devices, in order of preference. For each number of changes, workers and
/// carriers it knows the least and the most grains that the remaining devices can take, and prunes by these sums. If no
/// device has a gap, the sums have no holes and the search never goes back. With gaps it enumerates subsets: all of
/// them up to kExactDevices devices, and kStepLimit steps beyond.
[[nodiscard]] bool find_roles(const SplitProblem& problem, const RoleQuery& query, RolePlan& plan);

inline constexpr std::size_t kExactDevices = 8;
inline constexpr std::int64_t kStepLimit = 1 << 16;
/// With more devices the table of changes * workers would cost more than the split is worth. With reduction costs the
/// previous shares are then kept as a whole or not considered.
inline constexpr std::size_t kChangeTableDevices = 16;

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lane.hpp"

namespace paceline::plan::detail {

/// What one device does in a split, in order of preference between splits that are equal otherwise.
enum class Role : std::uint8_t {
  carry,  ///< has work that is not a multiple of the granularity: the one share with the remainder
  work,   ///< has a multiple of the granularity, not zero
  idle,   ///< has nothing
  keep,   ///< has what it had before, whatever that is
};

/// One device of a problem in grains. A range with low > high: the device cannot take that role.
struct Candidate {
  BoundedLane work;   ///< grains * granularity items; low >= 1
  BoundedLane carry;  ///< grains * granularity + remainder items
  bool may_idle = true;
  std::int64_t previous = 0;  ///< items, whatever they were
  /// Between idle and its smallest share lie sizes that it may not have: feasible sets are no longer intervals.
  [[nodiscard]] bool has_gap() const { return may_idle && work.low > 1; }
};

/// split_batch's problem after validation: integers in grains, costs as lanes.
struct SplitProblem {
  std::vector<Candidate> candidates;
  std::int64_t grains = 0;     ///< batch / granularity
  std::int64_t remainder = 0;  ///< batch % granularity
  std::int64_t granularity = 1;
  bool has_previous = false;
  std::span<const double> reduction_seconds;  ///< by number of working devices, or empty

  [[nodiscard]] std::int64_t batch() const { return grains * granularity + remainder; }
};

/// A role for each device and the ranges that go with them; the batch fits in.
struct RolePlan {
  std::int64_t changes = 0;
  std::vector<Role> roles;
  std::vector<BoundedLane> lanes;  ///< per device; low == high where nothing is left to choose

  /// Fewer changes first, then the preferred role on the lowest-numbered device where two plans differ.
  [[nodiscard]] bool better_than(const RolePlan& other) const {
    if (changes != other.changes) return changes < other.changes;
    return roles < other.roles;
  }
};

/// What the search is asked.
struct RoleQuery {
  double budget_seconds = 0.0;        ///< every device finishes by then, reduction not counted
  std::int64_t working_devices = -1;  ///< exactly so many have work; -1: any number
  bool prefer_previous = false;       ///< fewest changes from the previous shares
};

/// The best plan of roles under the query, or false if none fits. Depth first over the devices in order of preference,
/// pruned by the least and most grains that the devices still open can take for each number of changes, workers and
/// carriers: where no device has a gap these sums have no holes and the search does not go back; with gaps it
/// enumerates subsets, all of them up to kExactDevices devices and kStepLimit steps beyond.
[[nodiscard]] bool find_roles(const SplitProblem& problem, const RoleQuery& query, RolePlan& plan);

inline constexpr std::size_t kExactDevices = 8;
inline constexpr std::int64_t kStepLimit = 1 << 16;
/// Above, the table of changes * workers would cost more than the split is worth: with reduction costs the previous
/// shares are then kept as a whole or not considered.
inline constexpr std::size_t kChangeTableDevices = 16;

}  // namespace paceline::plan::detail

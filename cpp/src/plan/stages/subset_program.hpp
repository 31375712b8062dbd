// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <optional>

#include "plan/stages/device_sets.hpp"

namespace paceline::plan {

/// How many micro-batches the stages of a partition must be able to keep in flight.
struct DepthRule {
  std::int64_t most = 1;
  std::size_t stages = 0;  ///< if not 0: there are so many stages, and `alike` says what each needs
  /// So many stages have the same depth: the last ones 1, those before them 2, and so on. Of neighbours with the same
  /// depth only one works at a time: the first one waits for a backward before it begins another micro-batch.
  std::size_t alike = 1;

  [[nodiscard]] bool begins_alike(std::size_t stage) const { return (stages - stage) % alike == 0 || stage == 0; }
  [[nodiscard]] std::int64_t depth(std::size_t stage) const {
    return stages == 0 ? most : std::min(most, static_cast<std::int64_t>((stages - stage + alike - 1) / alike));
  }
};

/// What a partition must meet.
struct PartitionGoal {
  BatchSizes sizes;
  DepthRule depth;
  double seconds = 0.0;          ///< its stage_bound() is at most this
  std::int64_t extra_bytes = 0;  ///< that every device is imagined to have
};

/// The dynamic program over sets of devices: for each set, the furthest block that stages on its devices reach; among
/// equals, with the least time for a micro-batch to get there and back. For `exact`, all blocks that they reach with
/// the least such time are kept, which shows whether anything fits where boundaries or ties make an early start the
/// better one; it takes O(sets * classes * blocks^2).
///
/// Source: chains of tasks on unequal processors, Pinar, Tabak & Aykanat, JPDC 68, 2008; here with free order.
class SubsetProgram {
 public:
  SubsetProgram(const StageCosts& costs, const StageOptions& options, const DeviceSets& sets)
      : costs_(costs), options_(options), sets_(sets) {}

  [[nodiscard]] std::optional<Partition> find(const PartitionGoal& goal, bool exact = false);

 private:
  struct Reach {
    std::size_t block = 0;
    double around = 0.0;
    double turns = 0.0;         ///< of all micro-batches, on the stages before that have the depth of the next one
    std::size_t group = kNone;  ///< of the last device
    std::size_t from = 0;       ///< the first block of the last stage
    static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  };

  /// `first`: the device of the first stage, if tied parameters make a difference; else kNone.
  std::optional<Partition> find_from(const PartitionGoal& goal, bool exact, std::size_t first);
  void extend(const PartitionGoal& goal, bool exact, std::size_t first, std::size_t set, const Reach& reach);
  [[nodiscard]] Partition trace(std::size_t set, bool exact) const;
  [[nodiscard]] std::size_t device_of(std::size_t set, const Reach& reach) const {
    return sets_.next_device(sets_.without(set, reach.group), reach.group);
  }

  const StageCosts& costs_;
  const StageOptions& options_;
  const DeviceSets& sets_;
  std::size_t width_ = 1;       // entries per set
  std::vector<Reach> reached_;  // by set; for `exact`, by set and block
};

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/stages/stage_clock.hpp"

namespace paceline::plan {

/// A plan that was found, without what follows from it.
struct FoundPlan {
  Partition partition;
  std::int64_t micro_batches = 1;
  std::vector<std::int64_t> depths;
  double seconds = std::numeric_limits<double>::infinity();
  std::int64_t moved_bytes = 0;
};

/// The plans of a search that can still win: for each number of moved bytes the quickest one that none with fewer moved
/// bytes beats; with noise also the few quickest of each number of stages, since noise costs more where more stages
/// wait for each other.
class Finalists {
 public:
  Finalists(const StageCosts& costs, const StageOptions& options);

  /// A plan of so many stages that takes longer cannot win.
  [[nodiscard]] double limit(std::size_t stages) const;
  /// No plan that takes longer can win.
  [[nodiscard]] double limit() const;
  /// Seconds of the quickest; infinity if there is none.
  [[nodiscard]] double best_seconds() const { return best_; }
  /// The quickest; nullptr if there is none.
  [[nodiscard]] const FoundPlan* best() const;

  void offer(const Partition& partition, std::int64_t micro_batches, const Depths& depths);
  /// The plan that wins. There must be one.
  [[nodiscard]] FoundPlan winner() const;

 private:
  [[nodiscard]] double factor() const;

  const StageCosts& costs_;
  const StageOptions& options_;
  Partition previous_;
  bool noisy_ = false;
  double best_ = 0.0;
  std::vector<FoundPlan> front_;                  // fewer moved bytes first, so slower first
  std::vector<std::vector<FoundPlan>> quickest_;  // by number of stages less one; quickest first
};

}  // namespace paceline::plan

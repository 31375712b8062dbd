// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plan/stages/finalists.hpp"

namespace paceline::plan {

/// What the searches of plan_stages() share.
struct StageSearch {
  const StageCosts& costs;
  const StageOptions& options;
  Finalists& finalists;
  StageClock& clock;

  [[nodiscard]] bool fits_options(std::size_t stage, std::size_t device) const {
    return options.order.empty() || (stage < options.order.size() && options.order[stage] == device);
  }
  /// The depths of a partition. `all`: all of them are tried. False if it cannot win, or does not fit.
  bool offer(const Partition& partition, std::int64_t micro_batches, bool all) const;
};

/// Tries all partitions and depths with these numbers of micro-batches, except those whose bound shows that they cannot
/// win. False, with nothing tried, if these are too many.
bool try_all(const StageSearch& search, const std::vector<std::int64_t>& micro_batches);

/// Why nothing fits. @throws OutOfMemory
[[noreturn]] void refuse_memory(const StageCosts& costs, const StageOptions& options);

}  // namespace paceline::plan

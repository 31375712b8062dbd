// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "balance/policy.hpp"

namespace paceline::balance {

/// Gives a device that has no work a little of it now and then, so that a recovery is noticed.
///
/// A device with a zero share is not measured; what was true when it lost its work would be believed for good (observed
/// in simulation: two spikes running on a throttled device idled it for the rest of the run). The first probe comes 100
/// steps after it fell idle, the waits double to 1600: even where each probe costs half a step, that is under half a
/// percent. A probe that comes out differently is repeated at once, since two outliers make a change point.
class Probe {
 public:
  /// `present` with a little work for the devices that are due, or none.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> shares(const PolicyContext& context,
                                                                const std::vector<std::int64_t>& present);
  /// After every step: `ran` says which devices had evidence in it.
  void observe(const PolicyContext& context, const StepTimings& timings);

 private:
  struct Idle {
    std::int64_t due_step = 0;
    std::int64_t wait = 0;
  };
  std::map<std::size_t, Idle> idle_;
};

}  // namespace paceline::balance

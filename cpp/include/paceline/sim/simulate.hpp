// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/balance/balance.hpp>
#include <paceline/export.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::balance {
class LedgerWriter;
}

namespace paceline::sim {

struct SimulationOptions {
  BoxOptions box = {};
  std::int64_t batch_size = 512;
  std::int64_t steps = 400;
  std::int64_t granularity = 1;
  Balance policy = Balance::automatic;  ///< weighted takes the devices' speeds at the start as weights
  /// Gets every call of the balancer; may be null.
  std::shared_ptr<balance::LedgerWriter> ledger = {};
};

/// A change of the box to which the split should adapt.
struct BoxEvent {
  std::int64_t step = 0;
  std::size_t device = 0;
  std::string kind;  ///< "throttle", "release", "late start", "on time", "failure"
};

struct SimulationResult {
  /// The mean over steps of (makespan of the shares) / (oracle's makespan) - 1, without noise and without steps that
  /// were lost to a failure. First runs of a size count; the oracle has none.
  double loss_to_ideal = 0.0;
  /// The whole time, with noise and lost steps, divided by the oracle's noise-free time.
  double time_over_ideal = 0.0;
  double ideal_seconds = 0.0;    ///< the oracle's time for all steps
  double elapsed_seconds = 0.0;  ///< on the virtual clock
  std::int64_t moves = 0;
  double moves_per_100_steps = 0.0;
  std::int64_t lost_steps = 0;   ///< steps repeated because a device failed in them
  std::vector<BoxEvent> events;  ///< in order of steps
  /// Per event: the number of steps until the noise-free makespan is within 5 % of the new ideal. None if it is not
  /// before the next event at a later step, or before the end.
  std::vector<std::optional<std::int64_t>> steps_to_recover;
  std::vector<std::int64_t> final_shares;
  std::string explanation;  ///< Balancer::explain() at the end
};

/// Runs one balancer over one box.
/// @throws InvalidArgument if an option is not valid; Error if every device has failed.
PACELINE_API SimulationResult simulate(const SimulationOptions& options);

}  // namespace paceline::sim

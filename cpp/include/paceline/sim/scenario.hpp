// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/sim/simulate.hpp>

namespace paceline::sim {

/// The least loss of a rule that cannot look into the future, and the rule that the figure comes from.
struct Optimum {
  double loss = 0.0;  ///< in the unit of SimulationResult::loss_to_ideal
  std::string source;
};

/// Computes the optimum of a simulation. It is the better of two rules that know the box's true models without noise:
///
/// - One step late: each step uses the exact split for the speeds of the step before (the first step: the even split).
/// A
///   rule that follows changes loses at least this, because it cannot see a change before the step that it hits.
/// - One split for all: of the splits that are best at some step, the one with the least sum of times. A rule that
/// never
///   moves loses at least about this.
///
/// The oracle of SimulationResult loses nothing, but it knows changes before they come.
PACELINE_API Optimum optimum(const SimulationOptions& options);

/// A way in which training machines misbehave, and the bounds that the balancer must keep there.
struct Scenario {
  std::string name;   ///< "flapping"
  std::string about;  ///< what happens, and where such a thing was observed or published
  SimulationOptions options;
  double most_regret = 0.0;                ///< loss beyond the optimum's, mean over seeds
  double most_moves_per_100_steps = 0.0;   ///< mean over seeds
  std::int64_t most_steps_to_recover = 0;  ///< after any event, for the median seed; 0: no bound
};

/// All scenarios: 8 devices (unless they say otherwise) of 4 ms + 0.1 ms an item, a batch of 512.
PACELINE_API std::vector<Scenario> scenarios();

/// The result of one scenario over its seeds.
struct ScenarioResult {
  std::string name;
  double loss = 0.0;        ///< mean
  double worst_loss = 0.0;  ///< of one seed
  double even_loss = 0.0;   ///< of the even split, mean
  Optimum optimum;
  double regret = 0.0;  ///< loss beyond the optimum's
  double moves_per_100_steps = 0.0;
  /// For the event with the longest recovery, the median over the seeds. None without events, or without recovery.
  std::optional<std::int64_t> steps_to_recover;
  std::vector<std::string> missed;  ///< the bounds that were not kept, in words; empty if all were kept
};

/// Runs the balancer through a scenario with the seeds 1 to `seeds`, and compares the results with the bounds.
/// @throws InvalidArgument if `seeds` is less than 1.
PACELINE_API ScenarioResult run_scenario(const Scenario& scenario, std::int64_t seeds = 5);

}  // namespace paceline::sim

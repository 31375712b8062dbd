// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include <paceline/sim/scenario.hpp>

#include "refuse.hpp"

namespace paceline::sim {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// Of one run, the event that took longest.
std::int64_t longest_recovery(const SimulationResult& result) {
  std::int64_t longest = 0;
  for (const std::optional<std::int64_t>& steps : result.steps_to_recover) {
    longest = std::max(longest, steps.value_or(kNever));
  }
  return longest;
}

void hold(const Scenario& scenario, bool events, ScenarioResult& result) {
  if (result.regret > scenario.most_regret) {
    result.missed.push_back(fmt::format("the loss is {:.3f} % beyond the optimum's, at most {:.3f} % was asked",
                                        100.0 * result.regret, 100.0 * scenario.most_regret));
  }
  if (result.moves_per_100_steps > scenario.most_moves_per_100_steps) {
    result.missed.push_back(fmt::format("{:.2f} moves per 100 steps, at most {:.2f} were asked",
                                        result.moves_per_100_steps, scenario.most_moves_per_100_steps));
  }
  if (scenario.most_steps_to_recover == 0 || !events) return;
  if (!result.steps_to_recover || *result.steps_to_recover > scenario.most_steps_to_recover) {
    const std::string took = result.steps_to_recover ? fmt::to_string(*result.steps_to_recover) : "never ended";
    result.missed.push_back(
        fmt::format("steps to recover: {}, at most {} were asked", took, scenario.most_steps_to_recover));
  }
}

}  // namespace

ScenarioResult run_scenario(const Scenario& scenario, std::int64_t seeds) {
  if (seeds < 1) refuse("{} seeds: run a scenario with at least one", seeds);
  ScenarioResult result;
  result.name = scenario.name;
  result.optimum = optimum(scenario.options);
  SimulationOptions options = scenario.options;
  const auto runs = static_cast<double>(seeds);
  std::vector<std::int64_t> recoveries;
  bool events = false;
  for (std::int64_t seed = 1; seed <= seeds; ++seed) {
    options.box.seed = static_cast<std::uint64_t>(seed);
    const SimulationResult run = simulate(options);
    result.loss += run.loss_to_ideal / runs;
    result.worst_loss = std::max(result.worst_loss, run.loss_to_ideal);
    result.moves_per_100_steps += run.moves_per_100_steps / runs;
    recoveries.push_back(longest_recovery(run));
    events = events || !run.events.empty();
  }
  options.policy = Balance::even;
  result.even_loss = simulate(options).loss_to_ideal;  // shares do not depend on the noise
  result.regret = result.loss - result.optimum.loss;
  if (events) {
    const auto middle = recoveries.begin() + static_cast<std::ptrdiff_t>(recoveries.size() / 2);
    std::nth_element(recoveries.begin(), middle, recoveries.end());
    if (*middle != kNever) result.steps_to_recover = *middle;
  }
  hold(scenario, events, result);
  return result;
}

}  // namespace paceline::sim

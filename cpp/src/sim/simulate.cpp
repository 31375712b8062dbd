// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/simulate.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <ranges>

#include <paceline/error.hpp>

#include "refuse.hpp"

namespace paceline::sim {
namespace {

constexpr double kRecovered = 0.05;

balance::BalancerOptions balancer_options(const SimulationOptions& options) {
  balance::BalancerOptions out;
  out.policy = options.policy;
  out.granularity = options.granularity;
  for (const SimDevice& device : options.box.devices) {
    out.devices.push_back({device.name, device.device_class, device.limits});
    if (options.policy == Balance::weighted) out.weights.push_back(device.speed);
  }
  return out;
}

std::vector<BoxEvent> events_of(const SimulationOptions& options) {
  std::vector<BoxEvent> events;
  for (const Throttle& throttle : options.box.throttles) {
    events.push_back({throttle.from, throttle.device, "throttle"});
    events.push_back({throttle.to, throttle.device, "release"});
  }
  for (const LateStart& late : options.box.late_starts) {
    events.push_back({late.from, late.device, "late start"});
    events.push_back({late.to, late.device, "on time"});
  }
  for (const Failure& failure : options.box.failures) events.push_back({failure.step, failure.device, "failure"});
  std::erase_if(events, [&](const BoxEvent& event) { return event.step >= options.steps; });
  std::stable_sort(events.begin(), events.end(), [](const BoxEvent& a, const BoxEvent& b) { return a.step < b.step; });
  return events;
}

/// Per event, the steps from it to the first step with a small loss, before the next event at a later step.
std::vector<std::optional<std::int64_t>> recoveries(const std::vector<BoxEvent>& events,
                                                    const std::vector<double>& losses) {
  std::vector<std::optional<std::int64_t>> out;
  for (const BoxEvent& event : events) {
    const auto next =
        std::find_if(events.begin(), events.end(), [&](const BoxEvent& e) { return e.step > event.step; });
    const std::int64_t end = next == events.end() ? std::ssize(losses) : next->step;
    std::optional<std::int64_t> steps;
    for (std::int64_t k = event.step; k < end && !steps; ++k) {
      if (losses[static_cast<std::size_t>(k)] <= kRecovered) steps = k - event.step;
    }
    out.push_back(steps);
  }
  return out;
}

}  // namespace

SimulationResult simulate(const SimulationOptions& options) {
  if (options.steps < 1) refuse("{} steps: simulate at least one", options.steps);
  Box box(options.box);
  balance::Balancer balancer(balancer_options(options));
  if (options.ledger) balancer.write_to(options.ledger);
  SimulationResult result;
  result.events = events_of(options);
  std::vector<double> losses;
  for (std::int64_t step = 0; step < options.steps;) {
    const balance::StepPlan plan = balancer.next_plan(options.batch_size);
    const StepOutcome outcome = box.run(step, plan.shares);
    if (outcome.failed_device) {
      const std::size_t device = *outcome.failed_device;
      const std::string& name = options.box.devices[device].name;
      const auto alive = [&](std::size_t i) { return box.alive(i, step); };
      if (std::ranges::none_of(std::views::iota(std::size_t{0}, plan.shares.size()), alive)) {
        throw Error(fmt::format("step {}: {} failed and no device is left", step, name), name);
      }
      balancer.retire(device);
      ++result.lost_steps;
      continue;  // the other devices repeat the step
    }
    balancer.record(outcome.timings);
    const double ideal = box.ideal(step, options.batch_size);
    losses.push_back(box.makespan(step, plan.shares) / ideal - 1.0);
    result.loss_to_ideal += outcome.first_run_seconds / ideal / static_cast<double>(options.steps);
    result.ideal_seconds += ideal;
    result.final_shares = plan.shares;
    ++step;
  }
  for (const double loss : losses) result.loss_to_ideal += loss / static_cast<double>(losses.size());
  result.elapsed_seconds = box.now();
  result.time_over_ideal = box.now() / result.ideal_seconds;
  result.moves = balancer.move_count();
  result.moves_per_100_steps = 100.0 * static_cast<double>(result.moves) / static_cast<double>(options.steps);
  result.steps_to_recover = recoveries(result.events, losses);
  result.explanation = balancer.explain();
  return result;
}

}  // namespace paceline::sim

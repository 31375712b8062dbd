// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/sim/scenario.hpp>
#include <paceline/sim/simulate.hpp>

#include "bindings.hpp"
#include "device_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using namespace sim;

using Steps = std::int64_t;
using ThrottleTuple = std::tuple<std::size_t, double, Steps, Steps>;
using DriftTuple = std::tuple<std::size_t, double, double, Steps, Steps>;
using LateStartTuple = std::tuple<std::size_t, double, Steps, Steps>;
using PauseTuple = std::tuple<std::size_t, double, Steps, Steps>;
using FailureTuple = std::pair<std::size_t, Steps>;
using LastingNoiseTuple = std::tuple<double, double, bool>;

struct Result : SimulationResult {
  std::string ledger;
};

/// Each tuple holds the members of one Event, in order.
template <class Event, class Tuple>
void add(std::vector<Event>& events, const std::vector<Tuple>& given) {
  const auto event = [](auto... members) { return Event{members...}; };
  for (const Tuple& members : given) events.push_back(std::apply(event, members));
}

Result simulate_py(const std::vector<double>& speeds, std::int64_t batch_size, std::int64_t steps,
                   const std::string& policy, double noise, const std::vector<ThrottleTuple>& throttles,
                   const std::vector<FailureTuple>& failures, double spike_probability, double spike_factor,
                   std::uint64_t seed, double fixed_seconds, double per_item_seconds,
                   const std::optional<std::vector<std::string>>& device_classes, bool ledger,
                   const std::vector<DriftTuple>& drifts, const std::vector<PauseTuple>& pauses,
                   const std::vector<double>& reduction_seconds, double first_run_seconds,
                   const std::vector<LastingNoiseTuple>& lasting_noise,
                   const std::vector<LateStartTuple>& late_starts) {
  if (device_classes) require_size(device_classes->size(), speeds.size(), "device_classes", "device");
  SimulationOptions options{.batch_size = batch_size, .steps = steps, .policy = balance_named(policy)};
  BoxOptions& box = options.box;
  box.noise = noise;
  box.spike_probability = spike_probability;
  box.spike_factor = spike_factor;
  box.reduction_seconds = reduction_seconds;
  box.seed = seed;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    box.devices.push_back({.name = fmt::format("sim:{}", i),
                           .device_class = device_classes ? (*device_classes)[i] : "sim",
                           .speed = speeds[i],
                           .fixed_seconds = fixed_seconds,
                           .per_item_seconds = per_item_seconds,
                           .first_run_seconds = first_run_seconds});
  }
  add(box.lasting_noise, lasting_noise);
  add(box.throttles, throttles);
  add(box.drifts, drifts);
  add(box.pauses, pauses);
  add(box.late_starts, late_starts);
  add(box.failures, failures);
  std::ostringstream text;
  if (ledger) options.ledger = std::make_shared<balance::LedgerWriter>(text);
  const BlockingRegion release;
  Result result{simulate(options), {}};
  result.ledger = text.str();
  return result;
}

/// The scenarios with these names, in the library's order. No names means all scenarios.
std::vector<Scenario> named(const std::vector<std::string>& names) {
  std::vector<Scenario> all = scenarios();
  for (const std::string& name : names) {
    if (std::ranges::find(all, name, &Scenario::name) != all.end()) continue;
    std::vector<std::string> known;
    for (const Scenario& scenario : all) known.push_back("'" + scenario.name + "'");
    throw InvalidArgument(fmt::format("there is no scenario '{}': the scenarios are {}", name, fmt::join(known, ", ")));
  }
  std::erase_if(all, [&](const Scenario& scenario) {
    return !names.empty() && std::ranges::find(names, scenario.name) == names.end();
  });
  return all;
}

std::vector<ScenarioResult> run_suite(const std::vector<std::string>& names, std::int64_t seeds) {
  const std::vector<Scenario> chosen = named(names);
  const BlockingRegion release;
  std::vector<ScenarioResult> results;
  for (const Scenario& scenario : chosen) results.push_back(run_scenario(scenario, seeds));
  return results;
}

void bind_suite(py::module_& module) {
  py::class_<Scenario>(module, "Scenario", "A way in which training machines misbehave, with bounds for the balancer.")
      .def_readonly("name", &Scenario::name, "The name that results use.")
      .def_readonly("about", &Scenario::about, "What happens, and where it was observed or published.")
      .def_property_readonly(
          "steps", [](const Scenario& self) { return self.options.steps; }, "The number of simulated steps.")
      .def_readonly("most_regret", &Scenario::most_regret, "The bound on `ScenarioResult.regret`.")
      .def_readonly("most_moves_per_100_steps", &Scenario::most_moves_per_100_steps,
                    "The bound on `ScenarioResult.moves_per_100_steps`.")
      .def_readonly("most_steps_to_recover", &Scenario::most_steps_to_recover,
                    "The bound on `ScenarioResult.steps_to_recover`; 0: no bound.")
      .def("__repr__", [](const Scenario& self) { return fmt::format("Scenario('{}')", self.name); });
  py::class_<ScenarioResult>(module, "ScenarioResult", "The results of one scenario over its seeds.")
      .def_readonly("name", &ScenarioResult::name, "The name of the scenario.")
      .def_readonly("loss", &ScenarioResult::loss, "`SimulationResult.loss_to_ideal`, mean over the seeds.")
      .def_readonly("worst_loss", &ScenarioResult::worst_loss, "The largest loss of one seed.")
      .def_readonly("even_loss", &ScenarioResult::even_loss, "The loss of the even split.")
      .def_property_readonly(
          "optimum_loss", [](const ScenarioResult& self) { return self.optimum.loss; },
          "The smallest loss of a rule that cannot see the future.")
      .def_property_readonly(
          "optimum_source", [](const ScenarioResult& self) { return self.optimum.source; },
          "The source of `optimum_loss`.")
      .def_readonly("regret", &ScenarioResult::regret, "The loss minus `optimum_loss`.")
      .def_readonly("moves_per_100_steps", &ScenarioResult::moves_per_100_steps,
                    "Changes of shares, mean over the seeds.")
      .def_readonly("steps_to_recover", &ScenarioResult::steps_to_recover,
                    "For the slowest event, the median over the seeds; None without events, or if it never recovered.")
      .def_readonly("missed", &ScenarioResult::missed, "The bounds that were missed, as sentences.")
      .def("__repr__", [](const ScenarioResult& self) {
        return fmt::format("ScenarioResult('{}', regret={:.6f}, missed={})", self.name, self.regret,
                           self.missed.size());
      });
  module.def("scenarios", &scenarios, "All scenarios of the suite.");
  module.def("run_suite", &run_suite, "names"_a = std::vector<std::string>{}, py::kw_only(), "seeds"_a = 5,
             R"(Run the balancer through scenarios and check each result against its bounds.

Parameters
----------
names
    The scenarios to run; an empty list means all.
seeds
    Each scenario runs once for each seed from 1 to `seeds`.

Returns
-------
list of ScenarioResult

Raises
------
InvalidArgument
    For an unknown scenario, or fewer than one seed.)");
}

}  // namespace

void bind_sim(py::module_& module) {
  bind_suite(module);
  bind_sim_pipeline(module);
  bind_sim_data_path(module);
  bind_sim_pool(module);
  bind_sim_day(module);
  py::class_<sim::BoxEvent>(module, "Event", "A change of the simulated machine that the split should follow.")
      .def_readonly("step", &sim::BoxEvent::step, "The first step with the change.")
      .def_readonly("device", &sim::BoxEvent::device, "Index of the device.")
      .def_readonly("kind", &sim::BoxEvent::kind,
                    "\"throttle\", \"release\", \"late start\", \"on time\" or \"failure\".")
      .def("__repr__", [](const sim::BoxEvent& event) {
        return fmt::format("Event(step={}, device={}, kind='{}')", event.step, event.device, event.kind);
      });
  py::class_<Result>(module, "SimulationResult", "How a policy performed on a simulated machine.")
      .def_readonly("loss_to_ideal", &SimulationResult::loss_to_ideal,
                    "Mean over steps of (noise-free makespan of the shares used / that of the oracle's shares) - 1.")
      .def_readonly("time_over_ideal", &SimulationResult::time_over_ideal,
                    "The total time, noise and lost steps included, divided by the oracle's noise-free time.")
      .def_readonly("ideal_seconds", &SimulationResult::ideal_seconds, "The oracle's time for all steps.")
      .def_readonly("elapsed_seconds", &SimulationResult::elapsed_seconds, "The time that passed on the virtual clock.")
      .def_readonly("moves", &SimulationResult::moves, "Changes of shares.")
      .def_readonly("moves_per_100_steps", &SimulationResult::moves_per_100_steps, "Changes of shares, per 100 steps.")
      .def_readonly("lost_steps", &SimulationResult::lost_steps, "Steps repeated because a device failed.")
      .def_readonly("events", &SimulationResult::events, "The events, in order of steps.")
      .def_readonly("steps_to_recover", &SimulationResult::steps_to_recover,
                    "Per event, steps until within 5 % of the new ideal; None if the next event came first.")
      .def_readonly("final_shares", &SimulationResult::final_shares, "Items per device in the last step.")
      .def_readonly("explanation", &SimulationResult::explanation,
                    "The text of `Balancer.explain()` after the last step.")
      .def_readonly("ledger", &Result::ledger, "The ledger as JSON lines; empty unless requested.")
      .def("__repr__", [](const Result& self) {
        return fmt::format("SimulationResult(loss_to_ideal={:.6f}, moves={})", self.loss_to_ideal, self.moves);
      });
  module.def("simulate", &simulate_py, "speeds"_a, py::kw_only(), "batch_size"_a = 512, "steps"_a = 400,
             "policy"_a = "auto", "noise"_a = 0.0, "throttles"_a = std::vector<ThrottleTuple>{},
             "failures"_a = std::vector<FailureTuple>{}, "spike_probability"_a = 0.0, "spike_factor"_a = 1.0,
             "seed"_a = 0, "fixed_seconds"_a = 0.004, "per_item_seconds"_a = 0.0001, "device_classes"_a = py::none(),
             "ledger"_a = false, "drifts"_a = std::vector<DriftTuple>{}, "pauses"_a = std::vector<PauseTuple>{},
             "reduction_seconds"_a = std::vector<double>{}, "first_run_seconds"_a = 0.0,
             "lasting_noise"_a = std::vector<LastingNoiseTuple>{}, "late_starts"_a = std::vector<LateStartTuple>{},
             R"(Run the balancer on simulated devices with a virtual clock.

A device takes `(fixed_seconds + per_item_seconds * n) / speed` for n > 0 items, times throttles and noise. The balancer sees
only the times. Deterministic: equal arguments give equal results, and policies meet the same noise.

Parameters
----------
speeds
    One speed per device.
batch_size, steps
    Items per step; the number of steps that must succeed.
policy
    "auto", "even" or "weighted" (by `speeds`).
noise
    Times are multiplied by exp(noise * Z), Z standard normal.
throttles
    (device, factor, from, to): the device takes `factor` times as long in steps [from, to).
failures
    (device, step): the device stops in that step. The step is lost, and the other devices repeat it.
spike_probability, spike_factor
    With this probability a device's step takes `spike_factor` times as long.
seed
    The seed of the noise.
fixed_seconds, per_item_seconds
    The cost on a device of speed 1.
device_classes
    One class per device. Default: one class for all.
ledger
    Keep a ledger of the balancer's calls, for `paceline.balance.replay`.
drifts
    (device, first, last, from, to): the device takes `first` times as long up to step `from` and `last` times as long from step `to`
    on. In between, the factor changes gradually.
pauses
    (device, seconds, first, every): the device pauses for `seconds` in step `first` and every `every` steps after it (0: once).
    No split can avoid pauses, so the ideal does not contain them.
reduction_seconds
    At index k, the seconds that each step takes longer when k devices have work; k from 0. Default: none.
first_run_seconds
    Added when a device runs a size for the first time. Such times do not count as evidence.
lasting_noise
    (deviation, steps, common): additional noise on the logarithms of times. Its correlation over n steps is exp(-n / steps). If
    `common`, all devices have the same noise; otherwise each device has its own.
late_starts
    (device, seconds, from, to): the device begins steps [from, to) `seconds` later than the others.

Returns
-------
SimulationResult

Raises
------
InvalidArgument
    For invalid arguments. The message names the device or event.)");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>
#include <paceline/sim/simulate.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using namespace sim;

using ThrottleTuple = std::tuple<std::size_t, double, std::int64_t, std::int64_t>;

struct Result {
  SimulationResult simulated;
  std::string ledger;
};

Result simulate_py(const std::vector<double>& speeds, std::int64_t batch_size, std::int64_t steps,
                   const std::string& policy, double noise, const std::vector<ThrottleTuple>& throttles,
                   const std::vector<std::pair<std::size_t, std::int64_t>>& failures, double spike_probability,
                   double spike_factor, std::uint64_t seed, double fixed_seconds, double per_item_seconds,
                   const std::optional<std::vector<std::string>>& device_classes, bool ledger) {
  if (device_classes && device_classes->size() != speeds.size()) {
    throw InvalidArgument(fmt::format("device_classes has {} entries for {} devices; pass one per device",
                                      device_classes->size(), speeds.size()));
  }
  SimulationOptions options;
  options.batch_size = batch_size;
  options.steps = steps;
  options.policy = policy;
  options.box.noise = noise;
  options.box.spike_probability = spike_probability;
  options.box.spike_factor = spike_factor;
  options.box.seed = seed;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    SimDevice device;
    device.name = fmt::format("sim:{}", i);
    if (device_classes) device.device_class = (*device_classes)[i];
    device.speed = speeds[i];
    device.fixed_seconds = fixed_seconds;
    device.per_item_seconds = per_item_seconds;
    options.box.devices.push_back(std::move(device));
  }
  for (const auto& [device, factor, from, to] : throttles) options.box.throttles.push_back({device, factor, from, to});
  for (const auto& [device, step] : failures) options.box.failures.push_back({device, step});
  std::ostringstream text;
  if (ledger) options.ledger = std::make_shared<balance::LedgerWriter>(text);
  const py::gil_scoped_release release;
  Result result{simulate(options), {}};
  result.ledger = text.str();
  return result;
}

}  // namespace

void bind_sim(py::module_& module) {
  py::class_<Event>(module, "Event", "A change of the box that the split should follow.")
      .def_readonly("step", &Event::step, "The first step that it concerns.")
      .def_readonly("device", &Event::device, "Index of the device.")
      .def_readonly("kind", &Event::kind, "\"throttle\", \"release\" or \"failure\".")
      .def("__repr__", [](const Event& event) {
        return fmt::format("Event(step={}, device={}, kind='{}')", event.step, event.device, event.kind);
      });
  const auto get = [](auto member) { return [member](const Result& self) { return self.simulated.*member; }; };
  py::class_<Result>(module, "SimulationResult", "How a policy did on a simulated box.")
      .def_property_readonly(
          "loss_to_ideal", get(&SimulationResult::loss_to_ideal),
          "Mean over steps of the noise-free makespan of the shares used over the oracle's, minus 1.")
      .def_property_readonly(
          "time_over_ideal", get(&SimulationResult::time_over_ideal),
          "All the time that passed, noise and lost steps included, over the oracle's noise-free time.")
      .def_property_readonly("ideal_seconds", get(&SimulationResult::ideal_seconds), "The oracle's time for all steps.")
      .def_property_readonly("elapsed_seconds", get(&SimulationResult::elapsed_seconds), "On the virtual clock.")
      .def_property_readonly("moves", get(&SimulationResult::moves), "Changes of shares.")
      .def_property_readonly("moves_per_100_steps", get(&SimulationResult::moves_per_100_steps),
                             "Changes of shares, per 100 steps.")
      .def_property_readonly("lost_steps", get(&SimulationResult::lost_steps),
                             "Steps repeated because a device failed.")
      .def_property_readonly("events", get(&SimulationResult::events), "In order of steps.")
      .def_property_readonly("steps_to_recover", get(&SimulationResult::steps_to_recover),
                             "Per event, steps until within 5 % of the new ideal; None if not before the next event.")
      .def_property_readonly("final_shares", get(&SimulationResult::final_shares), "Items per device in the last step.")
      .def_property_readonly("explanation", get(&SimulationResult::explanation), "`Balancer.explain()` at the end.")
      .def_readonly("ledger", &Result::ledger, "JSON lines, empty unless asked for.")
      .def("__repr__", [](const Result& self) {
        return fmt::format("SimulationResult(loss_to_ideal={:.6f}, moves={})", self.simulated.loss_to_ideal,
                           self.simulated.moves);
      });
  module.def(
      "simulate", &simulate_py, py::arg("speeds"), py::kw_only(), py::arg("batch_size") = 512, py::arg("steps") = 400,
      py::arg("policy") = "auto", py::arg("noise") = 0.0, py::arg("throttles") = std::vector<ThrottleTuple>{},
      py::arg("failures") = std::vector<std::pair<std::size_t, std::int64_t>>{}, py::arg("spike_probability") = 0.0,
      py::arg("spike_factor") = 1.0, py::arg("seed") = 0, py::arg("fixed_seconds") = 0.004,
      py::arg("per_item_seconds") = 0.0001, py::arg("device_classes") = py::none(), py::arg("ledger") = false,
      R"(Run the balancer on simulated devices with a virtual clock.

A device takes `(fixed_seconds + per_item_seconds * n) / speed` for n > 0 items, times throttles and noise. The balancer sees
only the times. Deterministic: equal arguments give equal results, and policies meet the same noise.

Parameters
----------
speeds
    One per device.
batch_size, steps
    Items per step; steps that must succeed.
policy
    "auto", "even" or "weighted" (by `speeds`).
noise
    Times are multiplied by exp(noise * Z), Z standard normal.
throttles
    (device, factor, from, to): that device takes `factor` times as long in steps [from, to).
failures
    (device, step): the device stops in that step, which is lost and repeated by the others.
spike_probability, spike_factor
    So often a device's step takes `spike_factor` times as long.
seed
    Of the noise.
fixed_seconds, per_item_seconds
    The cost of a device of speed 1.
device_classes
    One name per device; default: all of one class.
ledger
    Keep the balancer's calls, for `paceline.balance.replay`.

Returns
-------
SimulationResult

Raises
------
InvalidArgument
    For arguments that make no sense, naming the device or event.)");
}

}  // namespace paceline::python

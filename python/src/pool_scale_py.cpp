// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/plan/pool_scale.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/sim/day.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using Row = std::tuple<double, double, double, double, bool, bool>;  // the members of ScaleDevice

std::vector<plan::ScaleDevice> devices_of(const std::vector<Row>& rows) {
  std::vector<plan::ScaleDevice> devices;
  for (const auto& [speed, price, activation, keep, active, usable] : rows) {
    devices.push_back({speed, price, activation, keep, active, usable});
  }
  return devices;
}

}  // namespace

void bind_pool_scale(py::module_& module) {
  module.def(
      "with_covers",
      [](std::vector<bool> wanted, const std::vector<Row>& devices,
         std::vector<std::pair<std::vector<bool>, std::size_t>> covers) {
        std::vector<plan::PoolCover> all;
        for (auto& [can, count] : covers) all.push_back({std::move(can), count});
        return plan::with_covers(std::move(wanted), devices_of(devices), all);
      },
      py::arg("wanted"), py::arg("devices"), py::arg("covers"),
      "Which devices shall be active: the wanted ones, and as many more as covers need, (which would do, how many) "
      "each. "
      "Devices are as for `Scaler.decide`.");
  py::class_<plan::Scaler>(module, "Scaler", "Which devices of a pool shall be active: as few as meet the wait.")
      .def(py::init([](double wait_seconds) { return plan::Scaler({.wait_seconds = wait_seconds}); }),
           py::arg("wait_seconds"))
      .def(
          "decide",
          [](plan::Scaler& self, const std::vector<Row>& devices, double seconds, double arrived_work,
             double arrived_jobs, double waiting_work, const std::tuple<double, double, double>& runs) {
            const auto& [count, work, square] = runs;
            return self.decide(devices_of(devices),
                               {seconds, arrived_work, arrived_jobs, waiting_work, count, work, square});
          },
          py::arg("devices"), py::kw_only(), py::arg("seconds"), py::arg("arrived_work"), py::arg("arrived_jobs"),
          py::arg("waiting_work"), py::arg("runs"),
          "Devices: (speed, price, seconds of its activation, seconds to keep it, active, usable) each. Runs in which "
          "the jobs that arrived will run: how many, their work, and the sum of its squares; 0 if nothing is known.")
      .def(
          "wait_of",
          [](const plan::Scaler& self, const std::vector<double>& speeds, double waiting_work) {
            plan::ScaleDemand demand = self.demand();
            demand.backlog = waiting_work;
            return plan::predicted_wait(speeds, demand);
          },
          py::arg("speeds"), py::arg("waiting_work"), "The wait that is predicted for devices of these speeds.")
      .def_property_readonly("work_per_second", [](const plan::Scaler& self) { return self.demand().work_per_second; })
      .def_property_readonly("wait_seconds", &plan::Scaler::wait_seconds)
      .def_property_readonly("desired", &plan::Scaler::desired);
}

void bind_sim_day(py::module_& module) {
  module.def(
      "simulate_day",
      [](const std::vector<double>& speeds, double wait_seconds, double activation_seconds, double job_seconds,
         double variation, double hours, double low, double high, std::int64_t bursts, double burst,
         double burst_seconds, double ramp_seconds, std::uint64_t seed, std::optional<double> deadline_seconds) {
        const sim::DayOptions options{
            .speeds = speeds,
            .activation_seconds = activation_seconds,
            .scale = {.wait_seconds = wait_seconds},
            .job_seconds = job_seconds,
            .variation = variation,
            .hours = hours,
            .low = low,
            .high = high,
            .bursts = bursts,
            .burst = burst,
            .burst_seconds = burst_seconds,
            .ramp_seconds = ramp_seconds,
            .seed = seed,
            .deadline_seconds = deadline_seconds.value_or(std::numeric_limits<double>::infinity())};
        const sim::DayResult result = [&] {
          const BlockingRegion released;
          return sim::simulate_day(options);
        }();
        return py::dict(
            py::arg("minutes") = result.minutes, py::arg("met") = result.met, py::arg("all_met") = result.all_met,
            py::arg("device_hours") = result.device_hours, py::arg("best_device_hours") = result.best_device_hours,
            py::arg("all_device_hours") = result.all_device_hours,
            py::arg("mean_wait_seconds") = result.mean_wait_seconds, py::arg("activations") = result.activations,
            py::arg("in_time") = result.in_time, py::arg("late") = result.late, py::arg("rejected") = result.rejected,
            py::arg("expired") = result.expired, py::arg("all_in_time") = result.all_in_time);
      },
      py::arg("speeds"), py::kw_only(), py::arg("wait_seconds") = 0.1, py::arg("activation_seconds") = 5.0,
      py::arg("job_seconds") = 0.05, py::arg("variation") = 0.3, py::arg("hours") = 24.0, py::arg("low") = 0.1,
      py::arg("high") = 0.6, py::arg("bursts") = 24, py::arg("burst") = 0.3, py::arg("burst_seconds") = 240.0,
      py::arg("ramp_seconds") = 60.0, py::arg("seed") = 1, py::arg("deadline_seconds") = py::none(),
      R"(A pool whose devices come and go over a day of requests, on a virtual clock, with the decisions of ``Pool(autoscale=...)``.

Deterministic. Requests come at random: few by night, many by day, and more in bursts.

Parameters
----------
speeds
    One positive number for each device.
wait_seconds
    The mean wait that is aimed at.
activation_seconds
    From when a device is wanted until it takes work, such as the load of its weights.
job_seconds, variation
    The mean of a request at speed 1, and its coefficient of variation (log-normal).
hours
    The length of the day.
low, high
    Arriving work by night and by day, over what all devices do.
bursts, burst, burst_seconds, ramp_seconds
    How many bursts there are, at random times; what each adds, over what all devices do; how long it lasts; in what time it comes, and goes.
seed
    Of all random numbers.
deadline_seconds
    The mean deadline; each request's is between half of it and one and a half. None: no deadlines.

Returns
-------
dict
    `minutes`, and in how many of them the target was `met` by the mean wait of the requests that came then and started; `all_met`, in how many it is with all devices active all day; `device_hours`, from when a device was
    wanted until it was not; `best_device_hours` of a plan in hindsight, and `all_device_hours` of all devices all day; `mean_wait_seconds`; how many
    `activations` there were. The parts of all requests that ended `in_time`, `late`, `rejected` and `expired`, and `all_in_time` with all devices active all day.

Raises
------
InvalidArgument
    For invalid arguments.

Notes
-----
Devices that deadlines need are wanted at once. For other requests the pool looks once a second: not at once when what waits begins to take longer than the target, as `Pool` does.

The plan in hindsight knows each request and what it takes, chooses devices anew each minute, begins each without a queue, pays for activations
before the minute, keeps its devices within the minute, and is the best sequence by dynamic programming. It knows no deadlines: it serves all requests.)");
}

}  // namespace paceline::python

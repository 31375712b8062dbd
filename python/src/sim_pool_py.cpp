// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/runtime/blocking.hpp>
#include <paceline/sim/pool.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {

void bind_sim_pool(py::module_& module) {
  module.def(
      "simulate_pool",
      [](const std::vector<double>& speeds, const std::variant<std::string, PlacementFunction>& placement,
         std::optional<std::vector<double>> believed, double decline, double fixed_seconds, double per_item_seconds,
         const std::vector<std::int64_t>& sizes, double max_delay_seconds, double length_variation, double load,
         double burst, double variation, bool exponential, std::optional<double> deadline_seconds,
         std::int64_t requests, std::uint64_t seed, const std::vector<std::pair<double, double>>& tenants,
         std::optional<std::pair<double, std::int64_t>> gangs, std::int64_t stages) {
        sim::PoolSimulationOptions options;
        options.speeds = speeds;
        options.believed = believed.value_or(std::vector<double>{});
        const bool custom = std::holds_alternative<PlacementFunction>(placement);
        if (custom) {
          const py::object asker = py::module_::import("paceline._pool_question").attr("asker");
          options.pool = with_placement(options.pool, "",
                                        asker(std::get<PlacementFunction>(placement)).cast<PlacementFunction>(), true);
        } else {
          options.pool = with_placement(options.pool, "", placement, true);
        }
        options.pool.decline = decline;
        options.fixed_seconds = fixed_seconds;
        options.per_item_seconds = per_item_seconds;
        options.sizes = sizes;
        options.max_delay_seconds = max_delay_seconds;
        options.length_variation = length_variation;
        options.load = load;
        options.burst = burst;
        options.variation = variation;
        options.exponential = exponential;
        options.deadline_seconds = deadline_seconds.value_or(std::numeric_limits<double>::infinity());
        options.requests = requests;
        options.seed = seed;
        for (const auto& [weight, share] : tenants) options.tenants.push_back({weight, share});
        if (gangs) std::tie(options.gang_part, options.gang) = *gangs;
        options.stages = stages;
        const sim::PoolSimulationResult result = [&] {
          std::optional<BlockingRegion> released;
          if (!custom) released.emplace();
          return sim::simulate_pool(options);
        }();
        py::list served;
        for (const sim::SimulatedTenantResult& one : result.tenants) {
          served.append(py::dict(py::arg("p50_wait_seconds") = one.p50_wait_seconds,
                                 py::arg("p99_wait_seconds") = one.p99_wait_seconds,
                                 py::arg("mean_wait_seconds") = one.mean_wait_seconds, py::arg("served") = one.served,
                                 py::arg("served_while_all_wait") = one.served_while_all_wait,
                                 py::arg("largest_charge") = one.largest_charge));
        }
        const auto waits = [](const sim::SimulatedWaits& one) {
          return py::dict(py::arg("p50_seconds") = one.p50_seconds, py::arg("p99_seconds") = one.p99_seconds,
                          py::arg("mean_seconds") = one.mean_seconds);
        };
        py::object of_gangs = py::none();
        if (gangs) {
          of_gangs =
              py::dict(py::arg("waits") = waits(result.gangs.waits),
                       py::arg("other_waits") = waits(result.gangs.other_waits), py::arg("idle") = result.gangs.idle,
                       py::arg("reserved") = result.gangs.reserved, py::arg("backfilled") = result.gangs.backfilled);
        }
        return py::dict(
            py::arg("gangs") = of_gangs, py::arg("p50_seconds") = result.p50_seconds,
            py::arg("p99_seconds") = result.p99_seconds, py::arg("mean_seconds") = result.mean_seconds,
            py::arg("mean_batch") = result.mean_batch, py::arg("in_time") = result.in_time,
            py::arg("late") = result.late, py::arg("rejected") = result.rejected, py::arg("expired") = result.expired,
            py::arg("elapsed_seconds") = result.elapsed_seconds, py::arg("busy") = result.busy,
            py::arg("batches") = result.batches, py::arg("tenants") = served,
            py::arg("unfairness") = std::isnan(result.unfairness) ? std::nullopt : std::optional(result.unfairness));
      },
      py::arg("speeds"), py::kw_only(), py::arg("placement") = "auto", py::arg("believed") = py::none(),
      py::arg("decline") = 0.5, py::arg("fixed_seconds") = 0.0, py::arg("per_item_seconds") = 0.01,
      py::arg("sizes") = std::vector<std::int64_t>{1}, py::arg("max_delay_seconds") = 0.0,
      py::arg("length_variation") = 0.0, py::arg("load") = 0.7, py::arg("burst") = 1.0, py::arg("variation") = 0.3,
      py::arg("exponential") = false, py::arg("deadline_seconds") = py::none(), py::arg("requests") = 20000,
      py::arg("seed") = 1, py::arg("tenants") = std::vector<std::pair<double, double>>{}, py::arg("gangs") = py::none(),
      py::arg("stages") = 1,
      R"(Requests on a pool of unequal devices, on a virtual clock, with the decisions of the library's own pool.

Deterministic: the n-th request arrives at the same time whatever the placement, and without batches it is the same work.

Parameters
----------
speeds
    One positive number for each device. n requests at once take (fixed_seconds + per_item_seconds * n) / speed in the mean.
placement
    ``"auto"``, ``"any"``, ``"round_robin"``, ``"least_outstanding"``, ``"weighted"`` or ``"earliest_finish"``. Or a function, as ``Pool`` has it:
    of a `paceline.plan.PoolQuestion`, which answers the name of a device or None. Devices are ``"sim:0"`` and so on. It is asked after each event.
believed
    What the pool takes the speeds to be. Default: the truth.
decline
    With ``"auto"``: how many times the gain of faster devices the waiting requests must outnumber, before a slower device takes one.
fixed_seconds, per_item_seconds
    Of a batch at speed 1.
sizes
    The sizes of batches that may run, ascending from 1. ``[1]``: no batches.
max_delay_seconds
    How long a batch may wait to become larger.
length_variation
    The coefficient of variation of the requests' lengths, log-normal with mean 1. The pool is told them, and a batch takes as long as one of
    its number times its longest. 0: all equal.
load
    Arriving work over what all devices can do in full batches without padding. A gang counts as one job alone on each of its devices.
burst
    The mean number of requests that arrive at once. 1: each by itself (Poisson).
variation, exponential
    The coefficient of variation of a batch's time, log-normal, or normal with batches; or exponential times.
deadline_seconds
    The mean deadline; each request's is between half of it and one and a half. None: no deadlines.
requests, seed
    Their number, and the seed of arrivals and times.
tenants
    A weight and a share of the requests for each tenant, as (weight, share). Empty: nobody has a name. A request costs its tenant 1, or its length; a
    gang costs that for each device.
gangs
    A part of the jobs and a number of devices, as (part, devices): so many jobs are gangs of so many devices. A gang takes as long as on its slowest device.
stages
    The jobs of a request, each with ``after=`` the one before. All are submitted when the request arrives, and each has its deadline. If one is rejected,
    those before it are cancelled. Each job has a batch's time of its own, and they have the request's length.

Returns
-------
dict
    `p50_seconds`, `p99_seconds` and `mean_seconds` from submit to result, without the first tenth of the requests; `mean_batch`; the parts of all
    requests that ended `in_time`, `late`, `rejected` and `expired`; `elapsed_seconds`; and for each device the part of the time in which it
    is `busy`, and its number of `batches`. ``tenants``: for each one `mean_wait_seconds`, `p50_wait_seconds` and `p99_wait_seconds` from submit to start,
    without the first tenth of the requests; its part of the cost that was `served`, and `served_while_all_wait`, of what started while requests of every
    tenant waited; and its `largest_charge`, of one request. `unfairness`: how far two tenants who both wait get apart at most, ``|W1 / w1 - W2 / w2|`` with W
    the cost of what each was served meanwhile, over the bound l1 / w1 + l2 / w2 with l the largest charges: at most 1. None where the bound says nothing:
    with deadlines, with lengths, since batches are of like ones, with gangs, which wait while others start, with a placement that binds requests to devices when they come, or where no two tenants waited. ``gangs``: `waits` and `other_waits`, of gangs and of jobs
    on one device, from when a job could run to its start; the part of all devices' time in which they are `idle` while a gang waits, and in which they are
    `reserved`: a device leaves another job waiting that would hold up the gang; and the part of the jobs on one device that were `backfilled`, started while
    a gang waited that is before them. None without gangs. With several stages a request has one outcome, and is in time if its last job is.

Raises
------
InvalidArgument
    For invalid arguments, and for a function that leaves requests waiting for ever, or answers what is no device. What it raises is raised.

Notes
-----
Tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), whose bound that is. Requests are independent. Launching, the GIL and transfers take no time. The pool knows the mean of each time, not the time itself.)");
  module.def("batch_sizes", &plan::batch_sizes, py::arg("most"), "The sizes of a pool's batches of at most so many.");
}

}  // namespace paceline::python

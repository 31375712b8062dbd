// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>

#include "bindings.hpp"
#include "move_reports.hpp"
#include "per_device.hpp"
#include "what_if_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using namespace balance;

using Run = std::variant<std::pair<std::int64_t, double>, std::tuple<std::int64_t, double, bool>>;

/// A balancer whose ledger, if it is kept, lies in memory.
struct RecordedBalancer {
  std::unique_ptr<std::ostringstream> text;  // at a fixed place: the writer points to it
  Balancer balancer;
};

std::unique_ptr<RecordedBalancer> make_balancer(
    const std::vector<std::string>& devices, const std::string& policy, const PerDevice<std::string>& device_classes,
    const std::optional<std::vector<double>>& weights, std::int64_t granularity,
    const PerDevice<std::optional<std::int64_t>>& minimum, const PerDevice<std::optional<std::int64_t>>& maximum,
    const PerDevice<bool>& may_be_zero, const PerDevice<double>& startup_seconds,
    const std::optional<std::vector<double>>& reduction_seconds, bool calibrate, bool proportional, bool ledger) {
  BalancerOptions options;
  options.policy = policy;
  options.weights = weights.value_or(std::vector<double>{});
  options.granularity = granularity;
  options.reduction_seconds = reduction_seconds.value_or(std::vector<double>{});
  options.calibrate = calibrate;
  options.proportional = proportional;
  const auto limits = share_limits(devices.size(), minimum, maximum, may_be_zero, startup_seconds);
  for (std::size_t i = 0; i < devices.size(); ++i) options.devices.push_back({devices[i], "device", limits[i]});
  for_each_device(device_classes, devices.size(), "device_classes",
                  [&](std::size_t i, std::string value) { options.devices[i].device_class = std::move(value); });
  auto made = std::make_unique<RecordedBalancer>(RecordedBalancer{nullptr, Balancer(std::move(options))});
  if (ledger) {
    made->text = std::make_unique<std::ostringstream>();
    made->balancer.write_to(std::make_shared<LedgerWriter>(*made->text));
  }
  return made;
}

void record(RecordedBalancer& self, const std::vector<std::vector<Run>>& devices, double step_seconds,
            double reduction_seconds, const std::vector<std::optional<double>>& startup_seconds) {
  StepTimings timings;
  timings.step_seconds = step_seconds;
  timings.reduction_seconds = reduction_seconds;
  timings.startup_seconds = startup_seconds;
  for (const auto& device : devices) {
    auto& runs = timings.devices.emplace_back();
    for (const Run& run : device) {
      std::visit(
          [&](const auto& parts) {
            MicroBatchTiming timing{std::get<0>(parts), std::get<1>(parts)};
            if constexpr (std::tuple_size_v<std::decay_t<decltype(parts)>> == 3) timing.excluded = std::get<2>(parts);
            runs.push_back(timing);
          },
          run);
    }
  }
  self.balancer.record(timings);
}

std::string ledger_of(const RecordedBalancer& self) {
  if (self.text == nullptr) throw InvalidArgument("no ledger is kept: make the balancer with ledger=True");
  return self.text->str();
}

py::dict report_of(const RecordedBalancer& self) {
  const BalanceReport report = self.balancer.report();
  py::list devices;
  for (const DeviceReport& device : report.devices) {
    py::dict entry;
    entry["name"] = device.name;
    entry["device_class"] = device.device_class;
    entry["retired"] = device.retired;
    entry["measured"] = device.measured;
    entry["share"] = device.share;
    entry["speed"] = device.speed;
    entry["noise"] = device.noise;
    entry["error"] = device.error;
    entry["fixed_seconds"] = device.fixed_seconds;
    entry["per_item_seconds"] = device.per_item_seconds;
    entry["equals"] = device.equals;
    entry["samples"] = device.samples;
    entry["since_step"] = device.since_step;
    entry["change_points"] = device.change_points;
    entry["drifts"] = device.drifts;
    entry["slowdown"] = device.slowdown;
    entry["regain"] = device.regain;
    entry["startup_seconds"] = device.startup_seconds;
    devices.append(std::move(entry));
  }
  py::dict out;
  out["policy"] = report.policy;
  out["steps"] = report.steps;
  out["moves"] = report.moves;
  out["taken_back"] = report.taken_back;
  out["possible_gain"] = report.possible_gain;
  out["required_gain"] = report.required_gain;
  out["last_reason"] = report.last_reason;
  out["devices"] = std::move(devices);
  out["recent_moves"] = move_dicts(report.recent_moves);
  return out;
}

WhatIfAnswer what_if(const RecordedBalancer& self, const WhatIfSpeeds& speeds, const WhatIfAdded& add,
                     const WhatIfRemoved& remove, const WhatIfBatchSize& batch_size) {
  return self.balancer.what_if(what_if_options(self.balancer, speeds, add, remove, batch_size));
}

void bind_what_if(py::module_& module) {
  py::class_<WhatIfAnswer>(module, "WhatIfAnswer", "The split that would be best then, and how long a step would take.")
      .def_readonly("names", &WhatIfAnswer::names, "The present devices, then those added.")
      .def_readonly("shares", &WhatIfAnswer::shares, "Items per name; 0 for those removed.")
      .def_readonly("seconds", &WhatIfAnswer::seconds, "Of a step with these shares, by the estimates.")
      .def_readonly("present_seconds", &WhatIfAnswer::present_seconds,
                    "Of a step with the shares now in force and the devices as they are.")
      .def_readonly("best_seconds", &WhatIfAnswer::best_seconds,
                    "Of a step with the best shares for the devices as they are.")
      .def_readonly("error", &WhatIfAnswer::error, "Relative standard error of `seconds`.")
      .def_readonly("text", &WhatIfAnswer::text, "In a sentence.")
      .def("__repr__", [](const WhatIfAnswer& self) { return fmt::format("WhatIfAnswer({})", self.text); });
}

void bind_balancer(py::module_& module) {
  py::class_<StepPlan>(module, "StepPlan", "What to run next, and the numbers behind it.")
      .def_readonly("step", &StepPlan::step, "Steps recorded before this one.")
      .def_readonly("batch_size", &StepPlan::batch_size, "Items of the whole batch.")
      .def_readonly("shares", &StepPlan::shares, "Items per device; they sum to the batch.")
      .def_readonly("models", &StepPlan::models,
                    "The present estimates, `plan.CostModel` each; empty before the first timing.")
      .def_readonly("noise", &StepPlan::noise, "Relative standard deviation of a device's time, per device.")
      .def_readonly("moved", &StepPlan::moved,
                    "Whether the shares differ from the last plan's for the same batch size.")
      .def_readonly("predicted_seconds", &StepPlan::predicted_seconds,
                    "Makespan by the models; 0 before the first timing.")
      .def_readonly("reason", &StepPlan::reason, "Why, in a sentence.")
      .def("__repr__", [](const StepPlan& plan) {
        return fmt::format("StepPlan(step={}, batch_size={}, shares={}, moved={}, reason={})", plan.step,
                           plan.batch_size, std::string(py::repr(py::cast(plan.shares))), plan.moved ? "True" : "False",
                           std::string(py::repr(py::cast(plan.reason))));
      });
  py::class_<RecordedBalancer>(module, "Balancer", R"(The closed loop: timings in, plans out.

Every plan is a pure function of the arguments and of the calls made so far. Not thread-safe.

Parameters
----------
devices
    Their names.
policy
    "auto", "even" or "weighted".
device_classes
    For all devices or one per device; devices of one class share the shape of their cost and are equal until measured otherwise. Default: all one class.
weights
    For "weighted": one per device, zeros allowed.
granularity
    Shares are multiples of it.
minimum, maximum
    The smallest share that is not zero, and the largest; for all devices or one per device, None for no limit.
may_be_zero
    Whether a device may be left without work (the default), for all devices or one per device.
startup_seconds
    What a device pays once a step if it has work, for all devices or one per device; until `record` is told what it measured.
reduction_seconds
    Seconds that a step ends later when k devices have work, at index k, from 0 to the number of devices; until `record` is told.
calibrate
    "auto" only: run the first two steps off the even split, to tell fixed from per-item time.
proportional
    A device's time is in proportion to its share: no fixed part is looked for.
ledger
    Keep a ledger of all calls, for `ledger()`.

Raises
------
InvalidArgument
    For arguments that make no sense.)")
      .def(py::init(&make_balancer), py::arg("devices"), py::arg("policy") = "auto", py::kw_only(),
           py::arg("device_classes") = py::none(), py::arg("weights") = py::none(), py::arg("granularity") = 1,
           py::arg("minimum") = py::none(), py::arg("maximum") = py::none(), py::arg("may_be_zero") = py::none(),
           py::arg("startup_seconds") = py::none(), py::arg("reduction_seconds") = py::none(),
           py::arg("calibrate") = true, py::arg("proportional") = false, py::arg("ledger") = false)
      .def(
          "next_plan",
          [](RecordedBalancer& self, std::int64_t batch_size) { return self.balancer.next_plan(batch_size); },
          py::arg("batch_size"),
          "The plan of the next step. Asked again without a record in between, it is the same plan.")
      .def("record", &record, py::arg("devices"), py::arg("step_seconds") = 0.0, py::kw_only(),
           py::arg("reduction_seconds") = 0.0, py::arg("startup_seconds") = std::vector<std::optional<double>>{},
           R"(The timings of the plan that `next_plan` last returned.

Parameters
----------
devices
    Per device a list of micro-batches (items, seconds) or (items, seconds, excluded); excluded ones are work but no evidence.
step_seconds
    From the first start to the last finish; 0: the largest sum of a device's seconds.
reduction_seconds
    From then to the end of the step; 0: unknown.
startup_seconds
    Per device from the step's first start to its own, None without work; of a device that came when nothing was left to
    do the whole `step_seconds`. Empty: unknown.)")
      .def(
          "retire", [](RecordedBalancer& self, std::size_t device) { self.balancer.retire(device); }, py::arg("device"),
          "The device with this index gets no further work.")
      .def(
          "restore", [](RecordedBalancer& self, std::size_t device) { self.balancer.restore(device); },
          py::arg("device"), "A device that was retired gets work again.")
      .def(
          "set_least_items", [](RecordedBalancer& self, std::int64_t items) { self.balancer.set_least_items(items); },
          py::arg("items"),
          "From the next plan on no share has fewer items, unless it is zero or the batch itself has fewer. 1: any "
          "share will do.")
      .def(
          "explain", [](const RecordedBalancer& self) { return self.balancer.explain(); },
          "In words: what was seen, what was decided and why, what a move would gain, what is not known.")
      .def("report", &report_of, R"(What `explain` says, as numbers.

Returns
-------
dict
    ``policy``; ``steps`` (recorded); ``moves`` (changes of shares, as `move_count`); ``taken_back`` (moves that measured worse than the
    shares before and were undone); ``possible_gain`` (the part of a step's time that the best split would save by the estimates, for the batch size
    of the last plan) and ``required_gain`` (what a move must promise at present; 0 unless "auto"); ``last_reason`` (of the last plan, in a
    sentence).

    ``devices``: one dictionary each, in order. ``name``, ``device_class``; ``retired``; ``share`` (items of the last plan); ``startup_seconds`` (how much
    later than the first device it starts a step); ``measured`` (False: it never ran anything that counts as evidence, and what follows is 0): ``speed``
    (relative to the fastest of its class), ``error`` (the relative standard error of that), ``noise`` (the relative standard deviation of one step's time);
    ``fixed_seconds`` and ``per_item_seconds`` (the estimate: n items take fixed + n * per item); ``equals`` (devices of its class that it cannot be told
    from, itself included); ``samples`` (steps of evidence since its speed last changed) and ``since_step`` (when that was); ``change_points`` and
    ``drifts`` (how often it changed suddenly, and slowly); ``slowdown`` (its time over that before the last change: 2 is twice as slow, 0 no change;
    no more than that of a device that it cannot be told from, so 1 where it is level with one that has not slowed down) and ``regain`` (the part of a
    step's time that would be saved if it were as fast as before; 0 if it is not slower).

    ``recent_moves``: the last 16 changes of shares that promised a gain, oldest first. ``step`` (how many were recorded before), ``batch_size``, the shares
    ``from`` and ``to``; ``promised_gain`` and ``measured_gain`` (the part of a step's time that was to be saved, and by the clock was);
    ``resolution`` (differences below it are noise); ``outcome``: "kept" or "taken back" (it measured worse) once 8 steps have run by it, before
    "pending", else "overtaken" by another move or a change of speed, or "unjudged" where nothing comparable ran before. The measured gain and
    the resolution are 0 unless it was judged.)")
      .def("what_if", &what_if, py::kw_only(), py::arg("speeds") = py::none(), py::arg("add") = py::none(),
           py::arg("remove") = py::none(), py::arg("batch_size") = py::none(),
           R"(What would the best split be, and how long a step, if devices had other speeds, came or left?

By the present estimates; changes nothing.

Parameters
----------
speeds
    Device names and factors on their present speed: {"cuda:1": 2.0} is twice as fast.
add
    (like, speed) each: one device more like the named one, so many times as fast.
remove
    Names of devices that would get no work.
batch_size
    Default: that of the last plan.

Returns
-------
WhatIfAnswer

Raises
------
InvalidArgument
    Before the first timing, for what is no such argument, a name that is not there, or a speed that is not above zero.)")
      .def("ledger", &ledger_of, "The calls so far as JSON lines, for `replay`.")
      .def_property_readonly(
          "move_count", [](const RecordedBalancer& self) { return self.balancer.move_count(); },
          "Changes of shares so far, for unchanged batch sizes.")
      .def("__repr__", [](const RecordedBalancer& self) {
        const BalanceReport report = self.balancer.report();
        return fmt::format("Balancer(policy='{}', devices={}, steps={}, moves={})", report.policy,
                           report.devices.size(), report.steps, report.moves);
      });
}

}  // namespace

void bind_balance(py::module_& module) {
  bind_what_if(module);
  bind_balancer(module);
  module.attr("LEDGER_VERSION") = kLedgerVersion;
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <fstream>
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
#include "device_arguments.hpp"
#include "file_ledger.hpp"
#include "step_loop_reports.hpp"
#include "what_if_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using namespace balance;
using namespace py::literals;

using Run = std::variant<std::pair<std::int64_t, double>, std::tuple<std::int64_t, double, bool>>;

/// A balancer and, if it keeps a ledger, the ledger's text in memory or its file.
struct RecordedBalancer : Balancer {
  using Balancer::Balancer;
  std::optional<std::ostringstream> text = {};
  std::filesystem::path file = {};
  std::shared_ptr<LedgerWriter> writer = {};
};

std::unique_ptr<RecordedBalancer> make_balancer(
    const std::vector<std::string>& devices, const std::string& policy,
    const DeviceArgument<std::string>& device_classes, const std::optional<std::vector<double>>& weights,
    std::int64_t granularity, const DeviceArgument<std::optional<std::int64_t>>& minimum,
    const DeviceArgument<std::optional<std::int64_t>>& maximum, const DeviceArgument<bool>& may_be_zero,
    const DeviceArgument<double>& startup_seconds, const std::optional<std::vector<double>>& reduction_seconds,
    bool calibrate, bool proportional, const std::string& unit,
    const std::variant<bool, std::filesystem::path>& ledger) {
  BalancerOptions options;
  options.policy = balance_named(policy);
  options.weights = weights.value_or(std::vector<double>{});
  options.granularity = granularity;
  options.reduction_seconds = reduction_seconds.value_or(std::vector<double>{});
  options.calibrate = calibrate;
  options.proportional = proportional;
  options.unit = unit;
  const auto limits = share_limits(devices.size(), minimum, maximum, may_be_zero, startup_seconds);
  for (std::size_t i = 0; i < devices.size(); ++i) options.devices.push_back({devices[i], "device", limits[i]});
  for_each_device(device_classes, devices.size(), "device_classes",
                  [&](std::size_t i, std::string value) { options.devices[i].device_class = std::move(value); });
  auto made = std::make_unique<RecordedBalancer>(std::move(options));
  if (const auto* const path = std::get_if<std::filesystem::path>(&ledger)) {
    made->writer = open_ledger("ledger", *path);
    made->file = std::filesystem::absolute(*path);  // the program may change its folder before it asks for the text
  } else if (std::get<bool>(ledger)) {
    made->writer = std::make_shared<LedgerWriter>(made->text.emplace());
  }
  made->write_to(made->writer);
  return made;
}

void record(RecordedBalancer& self, const std::vector<std::vector<Run>>& devices, double step_seconds,
            double reduction_seconds, const std::vector<std::optional<double>>& startup_seconds,
            const std::vector<double>& lent_parts) {
  StepTimings timings;
  timings.step_seconds = step_seconds;
  timings.reduction_seconds = reduction_seconds;
  timings.startup_seconds = startup_seconds;
  timings.lent_parts = lent_parts;
  for (const auto& device : devices) {
    auto& runs = timings.devices.emplace_back();
    for (const Run& run : device) {
      std::visit(
          [&](const auto& parts) {
            runs.push_back(std::apply([](auto... part) { return MicroBatchTiming{part...}; }, parts));
          },
          run);
    }
  }
  self.record(timings);
}

std::string ledger_of(const RecordedBalancer& self) {
  if (self.text) return self.text->str();
  if (!self.writer) throw InvalidArgument("no ledger is kept: make the balancer with ledger=True");
  std::ostringstream text;
  if (!(text << std::ifstream(self.file).rdbuf())) {
    throw InvalidArgument(fmt::format("the ledger cannot be read from {}", self.file.string()));
  }
  return text.str();
}

py::dict report_of(const RecordedBalancer& self) {
  const BalanceReport report = self.report();
  py::list devices;
  for (const DeviceReport& device : report.devices) {
    devices.append(py::dict("name"_a = device.name, "device_class"_a = device.device_class,
                            "retired"_a = device.retired, "measured"_a = device.measured, "share"_a = device.share,
                            "speed"_a = device.speed, "noise"_a = device.noise, "error"_a = device.error,
                            "fixed_seconds"_a = device.fixed_seconds, "per_item_seconds"_a = device.per_item_seconds,
                            "equals"_a = device.equals, "samples"_a = device.samples,
                            "since_step"_a = device.since_step, "change_points"_a = device.change_points,
                            "drifts"_a = device.drifts, "slowdown"_a = device.slowdown, "regain"_a = device.regain,
                            "startup_seconds"_a = device.startup_seconds, "lent_part"_a = device.lent_part));
  }
  return py::dict("policy"_a = report.policy, "unit"_a = report.unit, "steps"_a = report.steps,
                  "moves"_a = report.moves, "taken_back"_a = report.taken_back,
                  "possible_gain"_a = report.possible_gain, "required_gain"_a = report.required_gain,
                  "last_reason"_a = report.last_reason, "devices"_a = devices,
                  "recent_moves"_a = move_dicts(report.recent_moves));
}

WhatIfAnswer what_if(const RecordedBalancer& self, const WhatIfSpeeds& speeds, const WhatIfAdded& add,
                     const WhatIfRemoved& remove, const WhatIfBatchSize& batch_size) {
  return self.what_if(what_if_options(self, speeds, add, remove, batch_size));
}

void bind_what_if(py::module_& module) {
  py::class_<WhatIfAnswer>(module, "WhatIfAnswer",
                           "The best split for the devices asked about, and the time of a step.")
      .def_readonly("names", &WhatIfAnswer::names, "Names of the present devices, then of the added ones.")
      .def_readonly("shares", &WhatIfAnswer::shares, "Items per name; 0 for removed devices.")
      .def_readonly("seconds", &WhatIfAnswer::seconds, "Estimated time of a step with these shares.")
      .def_readonly("present_seconds", &WhatIfAnswer::present_seconds,
                    "Estimated time of a step with the present shares and devices.")
      .def_readonly("best_seconds", &WhatIfAnswer::best_seconds,
                    "Estimated time of a step with the best shares for the present devices.")
      .def_readonly("error", &WhatIfAnswer::error, "Relative standard error of `seconds`.")
      .def_readonly("text", &WhatIfAnswer::text, "The answer as a sentence.")
      .def("__repr__", [](const WhatIfAnswer& self) { return fmt::format("WhatIfAnswer({})", self.text); });
}

void bind_balancer(py::module_& module) {
  py::class_<StepPlan>(module, "StepPlan", "What each device runs in the next step, and the estimates behind it.")
      .def_readonly("step", &StepPlan::step, "Steps recorded before this one.")
      .def_readonly("batch_size", &StepPlan::batch_size, "Items of the whole batch.")
      .def_readonly("granularity", &StepPlan::granularity, "What the shares are multiples of, but for the rest.")
      .def_readonly("shares", &StepPlan::shares, "Items per device; they sum to the batch.")
      .def_readonly("models", &StepPlan::models,
                    "The present estimate per device, a `plan.CostModel`; empty before the first timing.")
      .def_readonly("noise", &StepPlan::noise, "Per device, the relative standard deviation of its time.")
      .def_readonly("moved", &StepPlan::moved,
                    "Whether the shares differ from the last plan's for the same batch size.")
      .def_readonly("predicted_seconds", &StepPlan::predicted_seconds,
                    "The makespan that the models predict; 0 before the first timing.")
      .def_readonly("reason", &StepPlan::reason, "The reason for the plan, as a sentence.")
      .def("__repr__", [](const StepPlan& plan) {
        return fmt::format("StepPlan(step={}, batch_size={}, shares={}, moved={}, reason={})", plan.step,
                           plan.batch_size, repr_of(plan.shares), plan.moved ? "True" : "False", repr_of(plan.reason));
      });
  py::class_<RecordedBalancer>(module, "Balancer", R"(The closed loop: timings in, plans out.

Every plan is a pure function of the arguments and of the calls made so far. Not thread-safe.

Parameters
----------
devices
    Names of the devices.
policy
    "auto", "even" or "weighted".
device_classes
    One class for all devices or one per device. Devices of one class share the shape of their cost and count as equally fast until measured. Default: one class.
weights
    For "weighted": one weight per device, zeros allowed.
granularity
    Shares are multiples of this number. 0, for "auto" only: of about 1/32 of an even share.
minimum, maximum
    The smallest nonzero share and the largest share, for all devices or one per device. None: no limit.
may_be_zero
    Whether a device may get no work (default: True), for all devices or one per device.
startup_seconds
    Seconds that a device with work spends once per step, for all devices or one per device. Measurements that `record` gets replace them.
reduction_seconds
    At index k, the seconds that a step takes longer when k devices have work; k from 0 to the number of devices. Measurements that `record` gets replace them.
calibrate
    "auto" only: run the first two steps off the even split, to separate fixed time from time per item.
proportional
    Assume that a device's time is proportional to its share, without a fixed part.
unit
    What batches and shares count, for texts and readers of the ledger.
ledger
    Keep a ledger of all calls, which `ledger()` returns. True: in memory. A path: in this file, which is replaced. Each line is there as soon as its call is made.

Raises
------
InvalidArgument
    For invalid arguments, and if the file cannot be opened or written to.)")
      .def(py::init(&make_balancer), "devices"_a, "policy"_a = "auto", py::kw_only(), "device_classes"_a = py::none(),
           "weights"_a = py::none(), "granularity"_a = 1, "minimum"_a = py::none(), "maximum"_a = py::none(),
           "may_be_zero"_a = py::none(), "startup_seconds"_a = py::none(), "reduction_seconds"_a = py::none(),
           "calibrate"_a = true, "proportional"_a = false, "unit"_a = "items", "ledger"_a = false)
      .def("next_plan", &RecordedBalancer::next_plan, "batch_size"_a,
           "The plan of the next step. Without a `record` in between, a second call returns the same plan.")
      .def("record", &record, "devices"_a, "step_seconds"_a = 0.0, py::kw_only(), "reduction_seconds"_a = 0.0,
           "startup_seconds"_a = std::vector<std::optional<double>>{}, "lent_parts"_a = std::vector<double>{},
           R"(Record the timings of the plan that `next_plan` returned last.

Parameters
----------
devices
    Per device a list of micro-batches (items, seconds) or (items, seconds, excluded). Excluded micro-batches count as work but not as evidence.
step_seconds
    Time from the first start to the last finish. 0: the largest sum of a device's seconds.
reduction_seconds
    Time from the last finish to the end of the step. 0: unknown.
startup_seconds
    Per device, the time from the step's first start to its own start; None without work. For a device that came too late to
    get work, the whole `step_seconds`. Empty: unknown.
lent_parts
    Per device, the part of its time in the step, from 0 to 1, in which it did other work, such as requests. The seconds in `devices` are without that.
    Empty: none.)")
      .def("retire", &RecordedBalancer::retire, "device"_a, "Give the device with this index no further work.")
      .def("restore", &RecordedBalancer::restore, "device"_a, "Give a retired device work again.")
      .def(
          "hint",
          [](RecordedBalancer& self, const std::vector<std::optional<std::pair<double, double>>>& models) {
            self.hint(hints_of(models));
          },
          "models"_a, R"(Begin with the best split for speeds that an earlier run measured.

"auto" only: it takes the place of the even split and of the calibration. Timings take its place, so wrong speeds are corrected. After the first timing it does nothing.

Parameters
----------
models
    Per device (fixed_seconds, per_item_seconds), as in `report`, or None: as fast as the fastest of its class, or else of all.

Raises
------
InvalidArgument
    For another number of models than devices, and for numbers that are negative or not finite.)")
      .def("set_least_items", &RecordedBalancer::set_least_items, "items"_a,
           "From the next plan on, every nonzero share has at least so many items, unless the batch has fewer. 1: no "
           "minimum.")
      .def(
          "explain", [](const RecordedBalancer& self) { return self.explain(); },
          "Text: what was measured, what was decided and why, what a move would gain, and what is unknown.")
      .def("report", &report_of, R"(What `explain` says, as numbers.

Returns
-------
dict
    ``policy``; ``unit`` (what shares count); ``steps`` (recorded steps); ``moves`` (changes of shares, as `move_count`); ``taken_back`` (moves that were undone because they
    measured worse); ``possible_gain`` (the fraction of a step's time that the best split would save, by the estimates and for the usual batch
    size); ``required_gain`` (the gain that a move must promise now; 0 unless "auto"); ``last_reason`` (the reason of the last plan of that size).

    The usual batch size is the one that most of the last 50 plans had, so the small last batch of an epoch is not it. Of equals it is the largest. If no size
    came twice, or in a quarter of them, it is that of the last plan.

    ``devices``: one dictionary per device, in order. ``name``; ``device_class``; ``retired``; ``share`` (items of the last plan of the usual size); ``startup_seconds``
    (how much later than the first device it starts a step); ``lent_part`` (the part of its time in a step that it lends to other work, such as
    requests, which the plans of "auto" count); ``measured`` (whether there is evidence; if not, all of the following are 0); ``speed``
    (relative to the fastest of its class); ``error`` (relative standard error of the speed); ``noise`` (relative standard deviation of one step's time);
    ``fixed_seconds`` and ``per_item_seconds`` (the estimate: n items take fixed + n * per item); ``equals`` (the number of devices of its class that
    measure the same, itself included); ``samples`` (steps of evidence since its speed last changed); ``since_step`` (the step of that change);
    ``change_points`` and ``drifts`` (how often the speed changed suddenly, and slowly); ``slowdown`` (its time divided by its time before the last
    change: 2 is twice as slow, 0 means no change. Of devices that measure the same, the smallest counts, so it is 1 if one of them has not slowed
    down); ``regain`` (the fraction of a step's time that its earlier speed would save; 0 if it is not slower).

    ``recent_moves``: the last 16 changes of shares that promised a gain, oldest first. ``step`` (the number of steps recorded before it);
    ``batch_size``; the shares ``from`` and ``to``; ``promised_gain`` and ``measured_gain`` (fractions of a step's time, expected and measured);
    ``resolution`` (smaller differences are noise); ``outcome``: "pending" until 8 steps have run with the new shares, then "kept" or "taken back"
    (it measured worse); or "overtaken" by another move or a change of speed; or "unjudged" if nothing comparable ran before. The measured gain
    and the resolution are 0 unless the move was judged.)")
      .def("what_if", &what_if, py::kw_only(), "speeds"_a = py::none(), "add"_a = py::none(), "remove"_a = py::none(),
           "batch_size"_a = py::none(),
           R"(Predict the best split and the time of a step for other devices: other speeds, more devices or fewer.

Uses the present estimates and changes nothing. Seconds are those of the device that ends last, with the reduction. What
recent steps of several devices took beyond their prediction, in parts of it, counts for each split over several devices.

Parameters
----------
speeds
    Factors on the present speed, by device name: {"cuda:1": 2.0} is twice as fast.
add
    Pairs (like, speed): one more device like the named one, at `speed` times its speed.
remove
    Names of devices that would get no work.
batch_size
    Default: the usual one (see `report`).

Returns
-------
WhatIfAnswer

Raises
------
InvalidArgument
    Before the first timing, for arguments of another type, for an unknown name, and for a speed that is not positive.)")
      .def("ledger", &ledger_of, "The calls so far as JSON lines, for `replay`.")
      .def_property_readonly(
          "ledger_failed", [](const RecordedBalancer& self) { return self.writer && self.writer->failed(); },
          "Whether a line of the ledger could not be written. No line is written after it, and the balancer goes on.")
      .def_property_readonly(
          "move_count", [](const RecordedBalancer& self) { return self.move_count(); },
          "Changes of shares so far, not counting changes of the batch size.")
      .def("__repr__", [](const RecordedBalancer& self) {
        const BalanceReport report = self.report();
        return fmt::format("Balancer(policy='{}', devices={}, steps={}, moves={})", report.policy,
                           report.devices.size(), report.steps, report.moves);
      });
}

}  // namespace

void bind_balance(py::module_& module) {
  bind_what_if(module);
  bind_balancer(module);
  module.def(
      "usual_batch_size", [](const std::vector<std::int64_t>& batch_sizes) { return usual_batch_size(batch_sizes); },
      py::arg("batch_sizes"), "The batch size that most of the last plans had (see `Balancer.report`), oldest first.");
  module.attr("LEDGER_VERSION") = kLedgerVersion;
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/balance/ledger.hpp>
#include <paceline/engine/stepper.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "garbage_collection.hpp"
#include "move_reports.hpp"
#include "python_program.hpp"
#include "queued_program.hpp"
#include "what_if_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using Claim = std::tuple<std::size_t, std::int64_t, std::int64_t, double, double, bool, bool>;

using Span = std::pair<std::int64_t, std::int64_t>;
using Script = std::vector<std::vector<Span>>;
using Piece = std::tuple<std::size_t, std::int64_t, std::int64_t>;

std::vector<std::vector<MicroBatch>> micro_batches_of(const std::optional<Script>& script) {
  std::vector<std::vector<MicroBatch>> lanes;
  if (!script) return lanes;
  for (const std::vector<Span>& spans : *script) {
    auto& lane = lanes.emplace_back();
    for (const auto& [begin, end] : spans) lane.push_back({.begin = begin, .end = end});
  }
  return lanes;
}

/// How a step ended. Keeps what commit() needs.
struct Outcome {
  std::shared_ptr<Step> step;
  std::size_t device_count = 0;

  [[nodiscard]] bool failed() const { return step->failure() != nullptr; }

  [[nodiscard]] std::optional<std::size_t> failed_device() const {
    const StepFailure* failure = step->failure();
    if (failure == nullptr || !failure->micro_batch) return std::nullopt;
    return failure->micro_batch->device_index;
  }

  [[nodiscard]] std::vector<Claim> claims() const {
    step->settle();
    std::vector<Claim> claims;
    for (const ClaimRecord& claim : step->record().claims) {
      const MicroBatch& mb = claim.micro_batch;
      claims.emplace_back(mb.device_index, mb.begin, mb.end, claim.start_seconds, claim.finish_seconds, claim.excluded,
                          mb.correction);
    }
    return claims;
  }
};

/// A ledger and the file it goes to.
struct FileLedger {
  explicit FileLedger(const std::string& path) : file(path, std::ios::trunc), writer(file) {}
  std::ofstream file;
  balance::LedgerWriter writer;
};

void write_ledger(Stepper& stepper, const std::string& path) {
  // Before the file is opened, which empties it: it may be the ledger of this very trainer.
  if (stepper.has_planned()) {
    throw InvalidArgument(fmt::format(
        "write_ledger: called after {} step{}, and a ledger that lacks steps cannot be replayed. Call it right "
        "after making the trainer. Nothing was written.",
        stepper.metrics().steps, stepper.metrics().steps == 1 ? "" : "s"));
  }
  if (stepper.writes_ledger()) {
    throw InvalidArgument("write_ledger: this trainer writes a ledger already. Nothing was written.");
  }
  auto ledger = std::make_shared<FileLedger>(path);
  if (!ledger->file) {
    throw InvalidArgument(
        fmt::format("write_ledger: {} cannot be opened for writing; check the folder and the permissions", path));
  }
  // The ledger begins with the first step. A space in front of it shows whether there is room.
  if (!(ledger->file << ' ' << std::flush)) {
    throw InvalidArgument(fmt::format("write_ledger: {} cannot be written to; is the disk full?", path));
  }
  stepper.write_to(std::shared_ptr<balance::LedgerWriter>(ledger, &ledger->writer));
}

// Hands a step to the workers with the interpreter let go, or they would wake up only to wait for it. True if the step
// is over by when signals are to be looked for.
bool start(Step& step) {
  const BlockingRegion region;
  step.start();
  return step.wait([] { return false; });
}

// Waits with the interpreter let go and looks for signals at least every 50 ms. On the first one no further micro-batch
// starts and those that run come to their end, so that nothing writes gradients after the exception has left; a second
// one leaves at once.
//
// With `queues` the devices work after the call: they are waited for only if the step fails.
Outcome run(Stepper& stepper, const std::shared_ptr<BatchPlan>& plan, py::object body, py::object finish,
            const std::optional<std::shared_ptr<TrainerQueues>>& shared, py::object outputs,
            const std::optional<Script>& script) {
  const std::shared_ptr<TrainerQueues> queues = shared.value_or(nullptr);
  const std::size_t device_count = stepper.group().size();
  stepper.require_idle();
  auto called = std::make_shared<PythonProgram>(std::move(body), std::move(finish), device_count);
  std::shared_ptr<StepProgram> program = called;
  std::shared_ptr<QueuedProgram> queued;
  if (queues != nullptr) program = queued = std::make_shared<QueuedProgram>(called, std::move(outputs), queues);
  const auto release = [&] { queued != nullptr ? queued->release() : called->release(); };
  Outcome outcome{stepper.prepare(plan, program, micro_batches_of(script)), device_count};
  // Not what wait() returns: the step may come to its end while the signal's handler runs.
  bool signalled = false;
  const auto no_signal = [&signalled] {
    signalled = PyErr_CheckSignals() != 0;
    return !signalled;
  };
  if (!start(*outcome.step) && no_signal()) outcome.step->wait(no_signal);
  if (signalled) {
    py::error_already_set interrupt;
    signalled = false;
    outcome.step->cancel();
    outcome.step->wait(no_signal);
    if (signalled) throw py::error_already_set();
    release();
    if (queues != nullptr) queues->queues.drain();
    throw interrupt;  // NOLINT: the object that was caught first is the one to go on
  }
  release();
  if (const StepFailure* failure = outcome.step->failure()) {
    if (queues != nullptr) queues->queues.drain();
    try {
      std::rethrow_exception(failure->error);
    } catch (const BodyFailed&) {
      return outcome;  // the Python side has the exception and raises it itself
    } catch (...) {
      outcome.step->rethrow_failure();
    }
  }
  return outcome;
}

const char* measure_name(plan::ItemMeasure measure) {
  if (measure == plan::ItemMeasure::padded) return "padded";
  return measure == plan::ItemMeasure::sum ? "sum" : "count";
}

py::dict metrics_dict(Stepper& stepper) {
  stepper.settle();
  const observe::Metrics metrics = stepper.metrics();
  const bool any_costs = stepper.item_report().has_value();
  double most_items = 0.0;
  double most_cost = 0.0;
  for (const observe::DeviceMetrics& device : metrics.devices) {
    most_items = std::max(most_items, device.items_per_second);
    most_cost = std::max(most_cost, device.cost_per_second);
  }
  py::dict devices;
  for (const observe::DeviceMetrics& device : metrics.devices) {
    py::dict entry;
    entry["share"] = device.last_items;
    entry["items"] = device.items;
    entry["busy_seconds"] = device.busy_seconds;
    entry["idle_seconds"] = device.idle_seconds;
    entry["items_per_second"] = device.items_per_second;
    entry["speed"] = most_cost > 0.0    ? device.cost_per_second / most_cost
                     : most_items > 0.0 ? device.items_per_second / most_items
                                        : 0.0;
    if (any_costs) {
      entry["cost"] = device.cost;
      entry["cost_per_second"] = device.cost_per_second;
    }
    devices[py::str(device.name)] = entry;
  }
  py::dict result;
  result["devices"] = devices;
  result["steps"] = metrics.steps;
  result["moves"] = metrics.moves;
  const balance::BalanceReport decided = stepper.balancer().report();
  result["taken_back"] = decided.taken_back;
  result["recent_moves"] = move_dicts(decided.recent_moves);
  result["imbalance"] = metrics.imbalance;
  result["compute_seconds"] = metrics.compute_seconds;
  result["step_seconds"] = metrics.step_seconds;
  return result;
}

py::object items_dict(Stepper& stepper) {
  stepper.settle();
  const std::optional<ItemReport> report = stepper.item_report();
  if (!report) return py::none();
  py::dict result;
  result["steps"] = report->steps;
  result["cost"] = report->padding.own;
  result["padded_cost"] = report->padding.padded;
  result["contiguous_cost"] = report->padding.contiguous;
  result["padding_saved"] = report->padding.saved();
  if (!report->fitted) return result;
  const plan::ItemCost& cost = report->shape.cost;
  result["device_class"] = report->device_class;
  result["measure"] = measure_name(report->shape.measure);
  result["fixed_seconds"] = cost.fixed_seconds;
  result["seconds_per_cost"] = cost.per_token_seconds;
  result["seconds_per_squared_cost"] = cost.per_squared_token_seconds;
  result["error"] = report->error;
  return result;
}

py::list events_list(Stepper& stepper) {
  stepper.settle();
  py::list events;
  for (const observe::Event& event : stepper.events().snapshot()) {
    py::dict entry;
    entry["kind"] = observe::name_of(event.kind);
    entry["device"] =
        event.device_index < 0
            ? py::object(py::none())
            : py::object(py::str(stepper.group().devices()[static_cast<std::size_t>(event.device_index)].name));
    entry["step"] = event.step;
    entry["begin"] = event.begin;
    entry["end"] = event.end;
    entry["start_seconds"] = event.start_seconds;
    entry["duration_seconds"] = event.duration_seconds;
    events.append(entry);
  }
  return events;
}

py::list history_list(Stepper& stepper) {
  stepper.settle();
  const std::vector<Device>& devices = stepper.group().devices();
  py::list rows;
  for (const observe::HistoryRow& row : stepper.history().snapshot()) {
    py::dict items;
    py::dict busy_seconds;
    py::dict costs;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      const py::str name(devices[d].name);
      if (!row.costs.empty()) costs[name] = row.costs[d];
      items[name] = row.items[d];
      busy_seconds[name] = row.busy_seconds[d];
    }
    py::dict entry;
    entry["first_step"] = row.first_step;
    entry["steps"] = row.steps;
    entry["items"] = items;
    entry["busy_seconds"] = busy_seconds;
    entry["costs"] = row.costs.empty() ? py::object(py::none()) : py::object(costs);
    entry["step_seconds"] = row.step_seconds;
    entry["longest_step_seconds"] = row.longest_step_seconds;
    entry["moves"] = row.moves;
    rows.append(entry);
  }
  return rows;
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<Outcome>(module, "StepOutcome", "How one step ended.")
      .def_property_readonly("failed", &Outcome::failed, "Whether a worker, or the reduction, raised.")
      .def_property_readonly("failed_device", &Outcome::failed_device,
                             "The index of the device that failed, or None if no single one is to blame.")
      .def_property_readonly(
          "settled", [](const Outcome& outcome) { return outcome.step->settled(); },
          "Whether the devices have done all that the step enqueued.")
      .def_property_readonly(
          "items", [](const Outcome& outcome) { return outcome.step->items(); }, "Items that each device ran.")
      .def_property_readonly(
          "claims", &Outcome::claims,
          "What ran: (device index, begin, end, start seconds, finish seconds, excluded, correction) each.");

  bind_queues(module);

  py::class_<BatchPlan, std::shared_ptr<BatchPlan>>(
      module, "BatchPlan",
      "Who runs which items of a batch. Order, bounds, first and work are "
      "empty where items have no costs.")
      .def_property_readonly(
          "shares", [](const BatchPlan& plan) { return plan.shares; }, "Items of each device.")
      .def_property_readonly(
          "order", [](const BatchPlan& plan) { return plan.arrangement.order; },
          "The items, by position: each device's together, by descending cost.")
      .def_property_readonly(
          "bounds", [](const BatchPlan& plan) { return plan.arrangement.bounds; },
          "Micro-batch k is the positions bounds[k] to bounds[k + 1] - 1.")
      .def_property_readonly(
          "first", [](const BatchPlan& plan) { return plan.arrangement.first; },
          "Device d runs micro-batches first[d] to first[d + 1] - 1.")
      .def_property_readonly(
          "work", [](const BatchPlan& plan) { return plan.arrangement.work; },
          "Of each device, in the balancer's units.")
      .def_property_readonly(
          "targets", [](const BatchPlan& plan) { return plan.balance.shares; },
          "What the balancer wants each device to have, of the items, or of the work where items have costs.");

  py::class_<Stepper>(module, "Stepper", "One balanced step after another on one group: plan, run, commit.")
      .def(py::init([](DeviceGroup group, std::string balance, std::vector<double> weights, std::int64_t micro_batch,
                       std::int64_t granularity, std::optional<bool> corrections) {
             StepperOptions options;
             options.balance = std::move(balance);
             options.weights = std::move(weights);
             options.micro_batch = micro_batch;
             options.granularity = granularity;
             options.corrections = corrections;
             return std::make_unique<Stepper>(std::move(group), std::move(options));
           }),
           py::arg("group"), py::kw_only(), py::arg("balance") = "auto", py::arg("weights") = std::vector<double>{},
           py::arg("micro_batch") = 0, py::arg("granularity") = 1, py::arg("corrections") = py::none())
      .def("set_corrections", &Stepper::set_corrections, py::arg("corrections"),
           "From the next plan on. None: on host devices.")
      .def("retire", &Stepper::retire, py::arg("device"),
           "The device with this index gets no work from the next step on, and no step waits for it.")
      .def("restore", &Stepper::restore, py::arg("device"), "It gets work again.")
      .def("set_least_items", &Stepper::set_least_items, py::arg("items"),
           "Of a micro-batch from the next plan on, unless the batch has fewer.")
      .def(
          "plan",
          [](Stepper& stepper, std::int64_t batch_size) {
            return std::const_pointer_cast<BatchPlan>(stepper.plan(batch_size));  // read-only in Python too
          },
          py::arg("batch_size"), "Plan a batch of so many items.")
      .def(
          "plan",
          [](Stepper& stepper, const std::vector<double>& costs) {
            return std::const_pointer_cast<BatchPlan>(stepper.plan(costs));
          },
          py::arg("costs"), "Plan a batch with one cost per item.")
      .def_property_readonly("items", &items_dict,
                             "What items cost and what padding was saved; None before the first plan with costs.")
      .def(
          "run", &run, py::arg("plan"), py::arg("body"), py::arg("finish"), py::arg("queues") = py::none(),
          py::arg("outputs") = py::none(), py::arg("claims") = py::none(),
          "Run the last plan: body(device, begin, end, last) -> int per micro-batch, finish(device) -> gradients. With "
          "costs begin and end are positions in the plan's order. claims: (begin, end) of the micro-batches to run "
          "instead of planned ones, for each device. See python_program.hpp, and queued_program.hpp for devices with "
          "queues.")
      .def("settle", &Stepper::settle, "Return when the times of all committed steps are known.")
      .def("cancel", &Stepper::cancel, "End the step that runs, if any, once every worker has left its micro-batch.")
      .def(
          "commit",
          [](Stepper& stepper, const Outcome& outcome, const std::vector<Piece>& pieces) {
            std::vector<MicroBatch> ran;
            for (const auto& [device, begin, end] : pieces) {
              ran.push_back({.begin = begin, .end = end, .device_index = device});
            }
            stepper.commit(outcome.step, std::move(ran));
          },
          py::arg("outcome"), py::arg("pieces") = std::vector<Piece>{},
          "Tell the balancer and the metrics about a step that succeeded; pieces: (device index, begin, end) each, if "
          "micro-batches were worked off in smaller ones.")
      .def_property_readonly(
          "metrics", &metrics_dict,
          "One snapshot: per device share, items, busy and idle seconds, rate; totals; the last moves.")
      .def_property_readonly("events", &events_list, "The last events, oldest first.")
      .def_property_readonly("history", &history_list,
                             "The whole run, oldest first, in at most 1024 rows of equally many steps.")
      .def("write_ledger", &write_ledger, py::arg("path"),
           "Write every call of the balancer to a file of JSON lines, from before the first step on.")
      .def(
          "what_if",
          [](Stepper& stepper, const WhatIfSpeeds& speeds, const WhatIfAdded& add, const WhatIfRemoved& remove,
             const WhatIfBatchSize& batch_size, std::optional<double> alone, double overhead_seconds) {
            stepper.settle();
            const balance::Balancer& balancer = stepper.balancer();
            balance::WhatIfOptions options = what_if_options(balancer, speeds, add, remove, batch_size);
            if (stepper.by_cost()) options.unit = "units of work";
            options.alone = alone;
            options.overhead_seconds = overhead_seconds;
            return balancer.what_if(options);
          },
          py::kw_only(), py::arg("speeds") = py::none(), py::arg("add") = py::none(), py::arg("remove") = py::none(),
          py::arg("batch_size") = py::none(), py::arg("alone") = py::none(), py::arg("overhead_seconds") = 0.0,
          "See `paceline.balance.Balancer.what_if`. alone: what a device's time is multiplied by when it works alone, "
          "if that was measured; overhead_seconds: of a step, outside of the devices' work.")
      .def("explain", [](Stepper& stepper) {
        stepper.settle();
        return stepper.explain();
      });

  module.def(
      "collect_garbage_if_due", &collect_if_due,
      "On a worker between two pieces of work: what Python's collector, which waits meanwhile, would have collected.");
}

}  // namespace paceline::python

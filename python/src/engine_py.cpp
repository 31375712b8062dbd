// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>
#include <paceline/observe/metrics.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "file_ledger.hpp"
#include "garbage_collection.hpp"
#include "interruptible.hpp"
#include "module_contents.hpp"
#include "nothing.hpp"
#include "python_program.hpp"
#include "step_loop_reports.hpp"
#include "tensor_memory.hpp"
#include "what_if_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using Claim = std::tuple<DeviceId, std::int64_t, std::int64_t, double, double, bool, bool>;

using Span = std::pair<std::int64_t, std::int64_t>;
using Script = std::vector<std::vector<Span>>;

std::vector<std::vector<MicroBatch>> micro_batches_of(const std::optional<Script>& script) {
  std::vector<std::vector<MicroBatch>> lists;
  if (!script) return lists;
  for (const std::vector<Span>& spans : *script) {
    auto& list = lists.emplace_back();
    for (const auto& [begin, end] : spans) list.push_back({.begin = begin, .end = end});
  }
  return lists;
}

std::optional<DeviceId> failed_device(const Step& step) {
  const StepFailure* failure = step.failure();
  if (failure == nullptr || !failure->micro_batch) return std::nullopt;
  return failure->micro_batch->device;
}

std::vector<Claim> claims_of(const Step& step) {
  step.settle();
  std::vector<Claim> claims;
  for (const ClaimRecord& claim : step.record().claims) {
    const MicroBatch& mb = claim.micro_batch;
    claims.emplace_back(mb.device, mb.begin, mb.end, claim.start_seconds, claim.finish_seconds, claim.excluded,
                        mb.correction);
  }
  return claims;
}

void write_ledger(StepLoop& step_loop, const std::string& path) {
  // Checked before the file is opened, because opening empties it, and it may be the ledger of this very trainer.
  if (step_loop.has_planned()) {
    throw InvalidArgument(fmt::format(
        "write_ledger: called after {} step{}, and a ledger that lacks steps cannot be replayed. Call it right "
        "after making the trainer. Nothing was written.",
        step_loop.metrics().steps, step_loop.metrics().steps == 1 ? "" : "s"));
  }
  if (step_loop.writes_ledger()) {
    throw InvalidArgument("write_ledger: this trainer writes a ledger already. Nothing was written.");
  }
  step_loop.write_to(open_ledger("write_ledger", path));
}

// With `queues` the devices work after the call, and are waited for only if the step fails.
std::shared_ptr<Step> run_plan(StepLoop& step_loop, const std::shared_ptr<BatchPlan>& plan, py::object body,
                               py::object finish, const std::optional<std::shared_ptr<TrainerQueues>>& shared,
                               const py::object& outputs, const std::optional<Script>& claims,
                               const std::optional<Script>& pieces) {
  const std::shared_ptr<TrainerQueues> queues = shared.value_or(nullptr);
  step_loop.require_idle();
  std::shared_ptr<PythonProgram> program;
  if (queues != nullptr) {
    program = std::make_shared<QueuedProgram>(std::move(body), std::move(finish), outputs, queues);
  } else {
    program = std::make_shared<PythonProgram>(std::move(body), std::move(finish), step_loop.group().ids());
  }
  std::shared_ptr<Step> step = step_loop.prepare(plan, program, {micro_batches_of(claims), micro_batches_of(pieces)});
  const auto abandon = [&] {
    program->release();
    if (queues != nullptr) queues->drain();
  };
  try {
    program->begin(*step);
  } catch (...) {
    abandon();
    throw;
  }
  run_interruptibly(*step, abandon);
  program->release();
  if (const StepFailure* failure = step->failure()) {
    if (queues != nullptr) queues->drain();
    try {
      std::rethrow_exception(failure->error);
    } catch (const BodyFailed&) {  // the Python side has the exception and raises it itself
    } catch (...) {
      step->rethrow_failure();
    }
  }
  return step;
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<Step, std::shared_ptr<Step>>(module, "StepOutcome", "How one step ended.")
      .def_property_readonly(
          "failed", [](const Step& step) { return step.failure() != nullptr; },
          "Whether a worker, or the reduction, raised.")
      .def_property_readonly("failed_device", &failed_device,
                             "The index of the device that failed, or None if no single one is to blame.")
      .def(
          "take_cause",
          [](const Step& step) {
            const StepFailure* failure = step.failure();
            return take_cause(failure == nullptr ? nullptr : failure->error);
          },
          "What the failed call of body or finish itself raised, or None if it returned. The second call returns None.")
      .def_property_readonly("settled", &Step::settled, "Whether the devices have done all that the step enqueued.")
      .def_property_readonly("items", &Step::items, "Items that each device ran.")
      .def_property_readonly("micro_batches", &Step::micro_batches, "How many micro-batches ran.")
      .def_property_readonly("divided", &Step::divided,
                             "Whether a device ran several, not counting those that memory asked for.")
      .def_property_readonly(
          "claims", &claims_of,
          "What ran: (device index, begin, end, start seconds, finish seconds, excluded, correction) each.")
      .def_property_readonly(
          "started",
          [](const Step& step) { return std::chrono::duration<double>(step.started().time_since_epoch()).count(); },
          "When the step was handed to the workers, in seconds of time.perf_counter. Its own clock starts here.")
      .def_property_readonly(
          "reduce_seconds",
          [](const Step& step) {
            step.settle();
            return step.record().reduce_seconds;
          },
          "From the end of the last micro-batch to the end of the reduction; 0 (not timed) with GPUs.")
      .def_property_readonly(
          "move",
          [](const Step& step) {
            const balance::StepPlan& plan = step.plan()->balance;
            return plan.moved ? std::optional(plan.reason) : std::nullopt;
          },
          "Why the shares differ from those of the step before, in a sentence; None if they do not.");

  bind_queues(module);
  bind_pipeline(module);
  bind_pool(module);
  bind_stage_planner(module);

  py::class_<BatchPlan, std::shared_ptr<BatchPlan>>(
      module, "BatchPlan",
      "Who runs which items of a batch. Order, bounds, first and work are "
      "empty where items have no costs.")
      .def_readonly("shares", &BatchPlan::shares, "Items of each device.")
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

  py::class_<StepLoop>(module, "StepLoop", "One balanced step after another on one group: plan, run, commit.")
      .def(py::init([](DeviceGroup group, std::string balance, std::vector<double> weights, std::int64_t micro_batch,
                       std::int64_t granularity, std::optional<bool> corrections,
                       std::vector<std::int64_t> memory_limits, bool search_sizes) {
             return std::make_unique<StepLoop>(std::move(group),
                                               StepLoopOptions{.balance = balance_named(balance),
                                                               .weights = std::move(weights),
                                                               .micro_batch = micro_batch,
                                                               .granularity = granularity,
                                                               .corrections = corrections,
                                                               .memory_limits = std::move(memory_limits),
                                                               .search_sizes = search_sizes});
           }),
           "group"_a, py::kw_only(), "balance"_a = "auto", "weights"_a = std::vector<double>{}, "micro_batch"_a = 0,
           "granularity"_a = 1, "corrections"_a = py::none(), "memory_limits"_a = std::vector<std::int64_t>{},
           "search_sizes"_a = false)
      .def("set_corrections", &StepLoop::set_corrections, "corrections"_a,
           "From the next plan on. None: on host devices.")
      .def("retire", &StepLoop::retire, "device"_a,
           "The device with this index gets no work from the next step on, and no step waits for it.")
      .def("restore", &StepLoop::restore, "device"_a, "It gets work again.")
      .def(
          "speeds",
          [](StepLoop& step_loop, bool by_cost) {
            step_loop.settle();
            std::vector<std::optional<std::pair<double, double>>> speeds;
            for (const std::optional<plan::CostModel>& model : step_loop.speeds(by_cost)) {
              speeds.emplace_back();
              if (model) speeds.back() = {model->fixed_seconds(), model->per_item_seconds()};
            }
            return speeds;
          },
          "by_cost"_a = false,
          "Per device, the measured (fixed seconds, seconds per item), by_cost per unit of work; None: not measured.")
      .def(
          "hint",
          [](StepLoop& step_loop, const std::vector<std::optional<std::pair<double, double>>>& speeds, bool by_cost) {
            step_loop.hint(hints_of(speeds), by_cost);
          },
          "speeds"_a, "by_cost"_a = false,
          "Begin with shares that fit these speeds, until something is measured. As `speeds` returns them.")
      .def("set_least_items", &StepLoop::set_least_items, "items"_a,
           "Of a micro-batch from the next plan on, unless the batch has fewer.")
      .def("set_longest", &StepLoop::set_longest, "seconds"_a,
           "Of a micro-batch whose size is free, from the next step on. 0: any.")
      .def(
          "plan",
          [](StepLoop& step_loop, std::int64_t batch_size, std::uint64_t memory, std::uint64_t speed, bool any_size) {
            // Read-only in Python too.
            return std::const_pointer_cast<BatchPlan>(step_loop.plan(batch_size, {memory, speed, any_size}));
          },
          "batch_size"_a, "memory"_a = 0, "speed"_a = 0, "any_size"_a = true,
          "Plan a batch of so many items. memory, speed: numbers of its kind. any_size: whether it may run in "
          "micro-batches of sizes that are searched.")
      .def(
          "plan",
          [](StepLoop& step_loop, const std::vector<double>& costs) {
            return std::const_pointer_cast<BatchPlan>(step_loop.plan(costs));
          },
          "costs"_a, "Plan a batch with one cost per item.")
      .def_property_readonly("items", &items_dict,
                             "What items cost and what padding was saved; None before the first plan with costs.")
      .def("run", &run_plan, "plan"_a, "body"_a, "finish"_a, "queues"_a = py::none(), "outputs"_a = py::none(),
           "claims"_a = py::none(), "pieces"_a = py::none(),
           "Run the last plan: body(device, begin, end, flags) -> int per micro-batch, finish(device) -> gradients. "
           "With costs begin and end are positions in the plan's order. claims: for each device, (begin, end) of the "
           "micro-batches to run instead of the planned ones. pieces: for each device, (begin, end) of the pieces "
           "that its claims run in. See python_program.hpp.")
      .def(
          "shrink", &StepLoop::shrink, "outcome"_a, "limited"_a,
          "After a step whose body ran out of memory: at most half of that runs at once from now on, on all devices of "
          "the memory, or where its own limit was reached on this device. False if there is nothing smaller.")
      .def_property_readonly("memory", &memory_dict, "By device with a limit: the limit, and what is known of memory.")
      .def("settle", &StepLoop::settle, "Return when the times of all committed steps are known.")
      .def_property_readonly("committed", &StepLoop::committed,
                             "How many steps `history` has, or will have once all times are known.")
      .def("cancel", &StepLoop::cancel, "End the step that runs, if any, once every worker has left its micro-batch.")
      .def(
          "commit", [](StepLoop& step_loop, std::shared_ptr<Step> outcome) { step_loop.commit(std::move(outcome)); },
          "outcome"_a, "Tell the balancer and the metrics about a step that succeeded.")
      .def_property_readonly(
          "metrics", py::overload_cast<StepLoop&>(&metrics_dict),
          "One snapshot: per device share, items, busy and idle seconds, rate; totals; the last moves.")
      .def_property_readonly("events", py::overload_cast<StepLoop&>(&events_list), "The last events, oldest first.")
      .def_property_readonly("history", py::overload_cast<StepLoop&>(&history_list),
                             "The whole run, oldest first, in at most 1024 rows of equally many steps.")
      .def("write_ledger", &write_ledger, "path"_a,
           "Write every call of the balancer to a file of JSON lines, from before the first step on.")
      .def(
          "what_if",
          [](StepLoop& step_loop, const WhatIfSpeeds& speeds, const WhatIfAdded& add, const WhatIfRemoved& remove,
             const WhatIfBatchSize& batch_size, std::optional<double> alone, double overhead_seconds) {
            step_loop.settle();
            const balance::Balancer& balancer = step_loop.balancer();
            balance::WhatIfOptions options = what_if_options(balancer, speeds, add, remove, batch_size);
            options.alone = alone;
            options.overhead_seconds = overhead_seconds;
            return balancer.what_if(options);
          },
          py::kw_only(), "speeds"_a = py::none(), "add"_a = py::none(), "remove"_a = py::none(),
          "batch_size"_a = py::none(), "alone"_a = py::none(), "overhead_seconds"_a = 0.0,
          "See `paceline.balance.Balancer.what_if`. alone: what a device's time is multiplied by when it works alone, "
          "if that was measured; overhead_seconds: of a step, outside of the devices' work.")
      .def("explain", [](StepLoop& step_loop) {
        step_loop.settle();
        return step_loop.explain();
      });

  py::class_<ModuleContents>(module, "ModuleContents",
                             "What modules hold in the dictionaries of these names. It keeps nothing alive.")
      .def(py::init<const std::vector<std::string>&, bool>(), "names"_a, py::kw_only(), "objects"_a)
      .def("note", &ModuleContents::note, "modules"_a, "Remember the present contents.")
      .def("same", &ModuleContents::same, "modules"_a,
           "Whether dictionaries, keys and, with objects, the objects are those that were noted.");
  py::class_<TensorMemory>(module, "TensorMemory", "What a step asks of hundreds of small tensors of one type.")
      .def(py::init<py::type>(), "type"_a)
      .def("copy", &TensorMemory::copy, "entries"_a,
           "Copy buffers, each given by (dictionary, other dictionary, name in both). Returns what was written and the "
           "entries that are left to PyTorch: what does not lie alike in plain memory of the host, or is large.")
      .def("without_gradients", &TensorMemory::without_gradients, "parameters"_a,
           "Whether no parameter has a gradient.")
      .def("apart", &TensorMemory::apart, "parameters"_a,
           "Whether each parameter has a gradient, and these are dense and share no memory.");
  module.attr("Nothing") = nothing_type();
  module.def(
      "collect_garbage_if_due", &collect_if_due,
      "On a worker between two pieces of work: what Python's collector, which waits meanwhile, would have collected.");
}

}  // namespace paceline::python

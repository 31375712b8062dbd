// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "device_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using plan::Action;
using plan::BlockCost;
using plan::PipelineTimes;
using plan::Schedule;
using plan::StageDevice;
using plan::StageOptions;
using plan::StagePlan;
using plan::StageProblem;
using plan::StageTimes;

// A schedule as Python sees it: per stage, pairs of "F" or "B" and the micro-batch.
using Actions = std::vector<std::vector<std::pair<std::string, std::int64_t>>>;

Actions actions_of(const Schedule& schedule) {
  Actions stages;
  for (const std::vector<Action>& actions : schedule.stages) {
    auto& stage = stages.emplace_back();
    for (const Action& action : actions)
      stage.emplace_back(action.kind == Action::Kind::forward ? "F" : "B", action.micro_batch);
  }
  return stages;
}

Schedule schedule_of(const Actions& stages) {
  Schedule schedule;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    std::vector<Action>& actions = schedule.stages.emplace_back();
    for (const auto& [kind, micro_batch] : stages[i]) {
      if (kind != "F" && kind != "B")
        throw InvalidArgument(
            fmt::format("stage {} has the action ('{}', {}); actions are ('F', micro-batch) or ('B', micro-batch)", i,
                        kind, micro_batch));
      actions.push_back({kind == "F" ? Action::Kind::forward : Action::Kind::backward, micro_batch});
    }
  }
  // check() finds what is missing; every stage runs the forward of each micro-batch.
  if (!schedule.stages.empty())
    schedule.micro_batches = std::ranges::count(schedule.stages[0], Action::Kind::forward, &Action::kind);
  plan::check(schedule);
  return schedule;
}

std::vector<StageTimes> times_of(const std::vector<double>& forward, const std::vector<double>& backward,
                                 const std::optional<std::vector<double>>& send_forward,
                                 const std::optional<std::vector<double>>& send_backward) {
  std::vector<StageTimes> times(forward.size());
  const auto set = [&](const std::vector<double>& values, const char* name, double StageTimes::* part) {
    require_size(values.size(), times.size(), name, "stage");
    for (std::size_t i = 0; i < times.size(); ++i) times[i].*part = values[i];
  };
  set(forward, "forward", &StageTimes::forward);
  set(backward, "backward", &StageTimes::backward);
  if (send_forward) set(*send_forward, "send_forward", &StageTimes::send_forward);
  if (send_backward) set(*send_backward, "send_backward", &StageTimes::send_backward);
  return times;
}

using Indices = std::optional<std::vector<std::size_t>>;

StagePlan plan_stages(const std::vector<BlockCost>& blocks, const std::vector<StageDevice>& devices,
                      std::int64_t batch_size, std::optional<std::int64_t> micro_batches, const Indices& cuts,
                      const Indices& order, const std::string& schedule, std::int64_t most_in_flight,
                      double link_latency_seconds, double link_bytes_per_second, std::int64_t tied_bytes,
                      const Indices& previous_cuts, const Indices& previous_order, double indifference) {
  const StageProblem problem{.blocks = blocks,
                             .devices = devices,
                             .batch_size = batch_size,
                             .link = {link_latency_seconds, link_bytes_per_second},
                             .tied_bytes = tied_bytes};
  const StageOptions options{.micro_batches = micro_batches,
                             .cuts = cuts.value_or(std::vector<std::size_t>{}),
                             .order = order.value_or(std::vector<std::size_t>{}),
                             .schedule = schedule_kind(schedule),
                             .most_in_flight = most_in_flight,
                             .indifference = indifference,
                             .previous_cuts = previous_cuts.value_or(std::vector<std::size_t>{}),
                             .previous_order = previous_order.value_or(std::vector<std::size_t>{})};
  const BlockingRegion release;
  return plan::plan_stages(problem, options);
}

void bind_costs(py::module_& module) {
  py::class_<BlockCost>(module, "BlockCost",
                        R"(What one block of a model costs: one of the layers between which it may be cut.

Seconds are on a device of speed 1. What comes before the first block belongs to the first block; what comes after the last one
(a head, its logits, the loss) belongs to the last block.)")
      .def(
          py::init([](double forward_per_item, double backward_per_item, double forward_fixed, double backward_fixed,
                      std::int64_t parameter_bytes, std::int64_t saved, std::int64_t boundary, std::int64_t workspace) {
            return BlockCost{forward_fixed, forward_per_item, backward_fixed, backward_per_item, parameter_bytes,
                             saved,         boundary,         workspace};
          }),
          py::kw_only(), "forward_per_item"_a, "backward_per_item"_a, "forward_fixed"_a = 0.0, "backward_fixed"_a = 0.0,
          "parameter_bytes"_a = 0, "saved_bytes_per_item"_a = 0, "boundary_bytes_per_item"_a = 0,
          "workspace_bytes_per_item"_a = 0,
          R"(
Parameters
----------
forward_per_item, backward_per_item
    Seconds per item of a micro-batch.
forward_fixed, backward_fixed
    Seconds of a micro-batch whatever its size.
parameter_bytes
    Bytes of parameters, their gradients and the optimizer's state.
saved_bytes_per_item
    What autograd keeps from forward to backward.
boundary_bytes_per_item
    The input, which is sent if a stage begins with this block.
workspace_bytes_per_item
    What it needs only while it runs.)")
      .def_readonly("forward_fixed", &BlockCost::forward_fixed, "Seconds of a forward, whatever its items.")
      .def_readonly("forward_per_item", &BlockCost::forward_per_item, "Seconds per item of a forward.")
      .def_readonly("backward_fixed", &BlockCost::backward_fixed, "Seconds of a backward, whatever its items.")
      .def_readonly("backward_per_item", &BlockCost::backward_per_item, "Seconds per item of a backward.")
      .def_readonly("parameter_bytes", &BlockCost::parameter_bytes, "Bytes of parameters and what trains them.")
      .def_readonly("saved_bytes_per_item", &BlockCost::saved_bytes_per_item, "What autograd keeps.")
      .def_readonly("boundary_bytes_per_item", &BlockCost::boundary_bytes_per_item, "The input, which may be sent.")
      .def("__repr__", [](const BlockCost& block) {
        return fmt::format("BlockCost(forward_per_item={}, backward_per_item={}, parameter_bytes={})",
                           repr_of(block.forward_per_item), repr_of(block.backward_per_item), block.parameter_bytes);
      });

  py::class_<StageDevice>(module, "StageDevice", "One device, as far as a pipeline is concerned.")
      .def(py::init([](std::string name, double speed, double noise, std::optional<std::int64_t> memory_bytes,
                       std::size_t memory_space) {
             return StageDevice{std::move(name), speed, noise, memory_bytes.value_or(StageDevice::kUnlimitedBytes),
                                memory_space};
           }),
           "name"_a = "", py::kw_only(), "speed"_a = 1.0, "noise"_a = 0.0, "memory_bytes"_a = py::none(),
           "memory_space"_a = 0,
           R"(
Parameters
----------
name
    For messages.
speed
    2: blocks take half of the time.
noise
    Relative standard deviation of the time of a forward or backward.
memory_bytes
    None: no limit.
memory_space
    Devices of one memory space send nothing to each other, and share tied parameters.)")
      .def("__repr__", [](const StageDevice& device) {
        return fmt::format("StageDevice({}, speed={})", repr_of(device.name), repr_of(device.speed));
      });
}

void bind_schedules(py::module_& module) {
  module.def(
      "gpipe",
      [](std::size_t stages, std::int64_t micro_batches) { return actions_of(plan::gpipe(stages, micro_batches)); },
      "stages"_a, "micro_batches"_a,
      R"(All forwards, then all backwards. Every stage keeps all micro-batches in flight.

Parameters
----------
stages, micro_batches
    How many; each at least 1.

Returns
-------
list of list of (str, int)
    Per stage, what it does, in order: ("F", micro-batch) or ("B", micro-batch).

Raises
------
InvalidArgument
    If there is no stage or no micro-batch.

Notes
-----
Huang et al., GPipe, NeurIPS 2019. Backwards run in the order of the micro-batches, too, so that gradients are summed in that order.)");
  module.def(
      "one_f_one_b",
      [](std::size_t stages, std::int64_t micro_batches, const std::optional<std::vector<std::int64_t>>& extra) {
        return actions_of(plan::one_f_one_b(stages, micro_batches, extra.value_or(std::vector<std::int64_t>{})));
      },
      "stages"_a, "micro_batches"_a, "extra"_a = py::none(),
      R"(One forward, one backward: stage i of k first runs k - i + extra[i] forwards, then alternates backwards and forwards.

Parameters
----------
stages, micro_batches
    How many; each at least 1.
extra
    Additional forwards before the first backward, per stage; None: none. More in flight hides links and noise. No stage has
    fewer in flight than the next one: where `extra` says so, it is raised.

Returns
-------
list of list of (str, int)
    Per stage, what it does, in order: ("F", micro-batch) or ("B", micro-batch).

Raises
------
InvalidArgument
    If there is no stage or no micro-batch, or for an `extra` of another size or with a negative number.

Notes
-----
Narayanan et al., PipeDream, SOSP 2019.

Examples
--------
>>> from paceline.plan import one_f_one_b
>>> one_f_one_b(2, 2)[1]
[('F', 0), ('B', 0), ('F', 1), ('B', 1)])");

  py::class_<PipelineTimes>(module, "PipelineTimes", "When everything happens in a pipeline, in seconds.")
      .def_readonly("seconds", &PipelineTimes::seconds, "When the last action ends.")
      .def_readonly("busy_seconds", &PipelineTimes::busy_seconds, "Per stage, how long it works.")
      .def_property_readonly(
          "actions",
          [](const PipelineTimes& times) {
            std::vector<std::vector<std::pair<double, double>>> stages;
            for (const auto& spans : times.actions) {
              auto& stage = stages.emplace_back();
              for (const plan::ActionSpan& span : spans) stage.emplace_back(span.start, span.finish);
            }
            return stages;
          },
          "Per stage, start and finish of each of its actions.")
      .def("__repr__",
           [](const PipelineTimes& times) { return fmt::format("PipelineTimes(seconds={})", repr_of(times.seconds)); });
  module.def(
      "pipeline_times",
      [](const Actions& schedule, const std::vector<double>& forward, const std::vector<double>& backward,
         const std::optional<std::vector<double>>& send_forward,
         const std::optional<std::vector<double>>& send_backward, const std::optional<std::vector<double>>& scale) {
        return plan::pipeline_times(schedule_of(schedule), times_of(forward, backward, send_forward, send_backward),
                                    scale.value_or(std::vector<double>{}));
      },
      "schedule"_a, "forward"_a, "backward"_a, py::kw_only(), "send_forward"_a = py::none(),
      "send_backward"_a = py::none(), "scale"_a = py::none(),
      R"(The exact times of a schedule: an action starts when its stage is free and its input has arrived.

Parameters
----------
schedule
    Per stage, a list of ("F", micro-batch) and ("B", micro-batch), as `gpipe` and `one_f_one_b` return it.
forward, backward
    Seconds of one micro-batch on each stage.
send_forward, send_backward
    Seconds until the next stage has the output, and the stage before the gradient, per sending stage. None: 0.
scale
    One factor per micro-batch for all its times, for unequal sizes. None: 1.

Returns
-------
PipelineTimes
    `seconds`, `busy_seconds` and `actions`.

Raises
------
InvalidArgument
    For sizes that do not match, negative or not finite times, and schedules that cannot run: the message names stage and action.

Examples
--------
>>> from paceline.plan import one_f_one_b, pipeline_times
>>> pipeline_times(one_f_one_b(2, 4), [1.0, 1.0], [2.0, 2.0]).seconds
15.0)");
}

std::string plan_repr(const StagePlan& plan) {
  return fmt::format("StagePlan(cuts={}, order={}, micro_batches={}, seconds={})", repr_of(plan.cuts),
                     repr_of(plan.order), plan.sizes.size(), repr_of(plan.seconds));
}

void bind_plans(py::module_& module) {
  py::class_<StagePlan, std::shared_ptr<StagePlan>>(
      module, "StagePlan", "A model that is cut into stages, with the device and the actions of each.")
      .def_readonly("cuts", &StagePlan::cuts, "The first block of each stage.")
      .def_readonly("order", &StagePlan::order, "The device of each stage.")
      .def_readonly("sizes", &StagePlan::sizes, "Items of each micro-batch; they differ by at most one.")
      .def_property_readonly(
          "schedule", [](const StagePlan& plan) { return actions_of(plan.schedule); },
          R"(Per stage, what it does, in order: ("F", micro-batch) or ("B", micro-batch).)")
      .def_property_readonly(
          "schedule_text", [](const StagePlan& plan) { return plan::to_text(plan.schedule); },
          "The schedule, a line per stage.")
      .def_property_readonly(
          "in_flight",
          [](const StagePlan& plan) {
            std::vector<std::int64_t> depths;
            for (std::size_t i = 0; i < plan.cuts.size(); ++i) depths.push_back(plan::in_flight(plan.schedule, i));
            return depths;
          },
          "The most micro-batches that each stage has in flight.")
      .def_readonly("bytes", &StagePlan::bytes, "Bytes that each stage needs.")
      .def_readonly("seconds", &StagePlan::seconds, "Seconds of a step, expected with noise.")
      .def_readonly("ideal_seconds", &StagePlan::ideal_seconds, "The work of the step over the speeds of all devices.")
      .def_readonly("bound_seconds", &StagePlan::bound_seconds, "No schedule of these stages is quicker.")
      .def_readonly("moved_bytes", &StagePlan::moved_bytes,
                    "Parameter bytes in another memory space than in the previous plan.")
      .def("__repr__", &plan_repr);
  module.def(
      "plan_stages", &plan_stages, "blocks"_a, "devices"_a, py::kw_only(), "batch_size"_a,
      "micro_batches"_a = py::none(), "cuts"_a = py::none(), "order"_a = py::none(), "schedule"_a = "auto",
      "most_in_flight"_a = 0, "link_latency_seconds"_a = 0.0, "link_bytes_per_second"_a = 0.0, "tied_bytes"_a = 0,
      "previous_cuts"_a = py::none(), "previous_order"_a = py::none(), "indifference"_a = 0.0,
      R"(Cut a model into stages over unequal devices so that a step takes as little time as possible and every stage fits.

Parameters
----------
blocks
    A `BlockCost` for each block, in order.
devices
    A `StageDevice` for each device. Devices that do not pay are left out.
batch_size
    Items of a step.
micro_batches
    How many. None: planned, 1 to batch_size.
cuts, order
    The first block, and the device, of each stage. None: planned.
schedule
    "auto", "gpipe" or "1f1b". GPipe is never quicker than 1F1B with as many in flight, so "auto" is 1F1B.
most_in_flight
    The most micro-batches that a stage may have in flight; 0: as many as fit.
link_latency_seconds, link_bytes_per_second
    How long it takes to send bytes between two memory spaces; 0 bytes per second: bytes take no time.
tied_bytes
    Parameter bytes that the first and the last block share. Both blocks' `parameter_bytes` include them.
previous_cuts, previous_order
    The present stages. Among plans whose time is within `indifference` of the best, the one that moves the fewest bytes wins.
indifference
    0.01: times within 1 % count as equal.

Returns
-------
StagePlan
    Cuts, order, sizes, schedule, bytes and seconds.

Raises
------
InvalidArgument
    For numbers that make no sense.
OutOfMemory
    If no plan fits. The message names the device that comes closest, its bytes, and what would help.

Notes
-----
Small cases are searched completely. Up to 8 devices, a dynamic program over sets of devices gives partitions (Pinar, Tabak & Aykanat,
JPDC 68, 2008), which are compared by the exact times of their schedules and improved step by step.

Examples
--------
>>> from paceline.plan import BlockCost, StageDevice, plan_stages
>>> block = BlockCost(forward_per_item=1.0, backward_per_item=2.0)
>>> plan = plan_stages([block] * 6, [StageDevice("fast", speed=2.0), StageDevice("slow")], batch_size=8)
>>> plan.cuts, plan.order
([0, 2], [1, 0]))");
}

}  // namespace

StageOptions::Kind schedule_kind(const std::string& name) {
  if (name == "auto") return StageOptions::Kind::automatic;
  if (name == "gpipe") return StageOptions::Kind::gpipe;
  if (name == "1f1b") return StageOptions::Kind::one_f_one_b;
  throw InvalidArgument(fmt::format("schedule is '{}'; it is 'auto', 'gpipe' or '1f1b'", name));
}

void bind_plan_stages(py::module_& module) {
  bind_costs(module);
  bind_schedules(module);
  bind_plans(module);
}

}  // namespace paceline::python

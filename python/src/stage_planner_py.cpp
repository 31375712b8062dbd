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

#include <paceline/engine/stage_log.hpp>
#include <paceline/engine/stage_planner.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/layout.hpp>
#include <paceline/runtime/blocking.hpp>

#include "action_records.hpp"
#include "bindings.hpp"
#include "device_arguments.hpp"
#include "stage_moves.hpp"
#include "step_loop_reports.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

/// Of parameters; per item what is saved, what comes in, and what it needs while it runs.
using BlockBytes = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using Bytes = std::optional<std::vector<std::int64_t>>;
/// Block, device, whether it is the backward, items, seconds.
using Sample = std::tuple<std::size_t, std::size_t, bool, std::int64_t, double>;
using SharedPlan = std::shared_ptr<plan::StagePlan>;

SharedPlan read_only(std::shared_ptr<const plan::StagePlan> plan) {  // Python cannot write to it either
  return std::const_pointer_cast<plan::StagePlan>(std::move(plan));
}

std::unique_ptr<StagePlanner> make_planner(std::vector<plan::BlockCost> blocks, std::vector<plan::StageDevice> devices,
                                           const std::optional<std::int64_t>& micro_batches,
                                           std::vector<std::size_t> cuts, const std::string& schedule, bool measure) {
  plan::StageProblem problem{.blocks = std::move(blocks), .devices = std::move(devices)};
  plan::StageOptions options{.micro_batches = micro_batches, .cuts = std::move(cuts)};
  options.schedule = schedule_kind(schedule);
  return std::make_unique<StagePlanner>(std::move(problem), std::move(options), balance::MoveCost{}, measure);
}

void set_bytes(StagePlanner& planner, const std::vector<BlockBytes>& blocks) {
  std::vector<plan::BlockCost> costs;
  for (const auto& [parameters, saved, boundary, workspace] : blocks) {
    plan::BlockCost& cost = costs.emplace_back();
    cost.parameter_bytes = parameters;
    cost.saved_bytes_per_item = saved;
    cost.boundary_bytes_per_item = boundary;
    cost.workspace_bytes_per_item = workspace;
  }
  planner.set_bytes(costs);
}

void record_samples(StagePlanner& planner, const std::vector<Sample>& samples, const std::vector<BlockBytes>& bytes,
                    const std::vector<std::size_t>& classes) {
  std::vector<BlockSample> all;
  for (const auto& [block, device, backward, items, seconds] : samples) {
    all.push_back({block, device, backward, items, seconds});
  }
  set_bytes(planner, bytes);
  planner.ran();
  planner.record(std::move(all), classes);
}

void record_actions(StagePlanner& planner, const ActionTuples& stages, bool excluded) {
  std::vector<balance::MeasuredStage> timings;
  for (auto actions : records_of(stages)) {
    std::ranges::sort(actions, {}, [](const ActionRecord& one) { return one.action.micro_batch; });
    balance::MeasuredStage& stage = timings.emplace_back();
    stage.excluded = excluded;
    for (const ActionRecord& one : actions) {
      const bool forward = one.action.kind == plan::Action::Kind::forward;
      (forward ? stage.forwards : stage.backwards).push_back(one.finish_seconds - one.start_seconds);
    }
  }
  planner.record(*planner.last(), timings);
}

py::dict dict_of_layout(const plan::Layout& layout) {
  return py::dict("kind"_a = std::string(plan::name_of(layout.kind)), "fits"_a = layout.fits,
                  "seconds"_a = layout.seconds, "reduction_seconds"_a = layout.reduction_seconds,
                  "bubble"_a = layout.bubble, "bytes"_a = layout.bytes, "items"_a = layout.items,
                  "pipelines"_a = layout.pipelines, "reason"_a = layout.reason);
}

py::list layouts(const StagePlanner& planner, std::int64_t batch_size, const std::optional<std::int64_t>& micro_batches,
                 double overlap, const Bytes& weight_bytes, const Bytes& gradient_bytes) {
  plan::StageProblem problem = planner.balancer().problem();
  problem.batch_size = batch_size;
  const auto set = [&](const Bytes& given, const char* name, std::int64_t plan::BlockCost::* member) {
    if (!given) return;
    require_size(given->size(), problem.blocks.size(), name, "block");
    for (std::size_t i = 0; i < given->size(); ++i) problem.blocks[i].*member = (*given)[i];
  };
  set(weight_bytes, "weight_bytes", &plan::BlockCost::weight_bytes);
  set(gradient_bytes, "gradient_bytes", &plan::BlockCost::gradient_bytes);
  plan::LayoutOptions options;
  options.stages.micro_batches = micro_batches;
  options.overlap = overlap;
  const std::vector<plan::Layout> found = [&] {
    const BlockingRegion release;
    return plan::plan_layouts(problem, options);
  }();
  py::list out;
  for (const plan::Layout& layout : found) out.append(dict_of_layout(layout));
  return out;
}

std::vector<double> speeds_of(const plan::StageProblem& problem) {
  std::vector<double> speeds;
  for (const plan::StageDevice& device : problem.devices) speeds.push_back(device.speed);
  return speeds;
}

void bind_log(py::module_& module) {
  py::class_<StageLog>(module, "StageLog", "Figures, events and history of a pipeline's steps.")
      .def(py::init<const DeviceGroup&>(), "group"_a)
      .def(
          "add",
          [](StageLog& log, const std::vector<std::tuple<DeviceId, std::int64_t, std::int64_t>>& stages,
             const std::vector<std::pair<std::int64_t, std::int64_t>>& bounds, const ActionTuples& actions,
             double started, bool moved) {
            std::vector<StageRun> ran;
            for (const auto& [device, blocks, items] : stages) ran.push_back({device, blocks, items});
            const std::chrono::duration<double> since(started);
            log.add(ran, bounds, records_of(actions),
                    std::chrono::steady_clock::time_point(
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(since)),
                    moved);
          },
          "stages"_a, "bounds"_a, "actions"_a, "started"_a, "moved"_a,
          "A step that was committed. stages: (device, blocks, items) each; bounds: (begin, end) of each micro-batch; "
          "actions: as PipelineOutcome.record, in seconds since `started` by time.perf_counter().")
      .def_property_readonly(
          "metrics", [](const StageLog& log) { return metrics_dict(log.metrics(), false); },
          "One snapshot, as StepLoop.metrics.")
      .def_property_readonly(
          "events",
          [](const StageLog& log) { return events_list(log.events(), {log.devices(), log.metrics().devices}); },
          "The last events, oldest first.")
      .def_property_readonly(
          "history", [](const StageLog& log) { return history_list(log.history(), log.metrics().devices); },
          "The whole run, oldest first, in at most 1024 rows of equally many steps.");
}

}  // namespace

void bind_stage_planner(py::module_& module) {
  py::class_<StagePlanner>(module, "StagePlanner",
                           "Says what a pipeline's next step runs. The first steps measure the blocks.")
      .def(py::init(&make_planner), "blocks"_a, "devices"_a, py::kw_only(), "micro_batches"_a = py::none(),
           "cuts"_a = std::vector<std::size_t>{}, "schedule"_a = "auto", "measure"_a = true)
      .def(
          "plan", [](StagePlanner& planner, std::int64_t items) { return read_only(planner.plan(items)); },
          "batch_size"_a, "What the next step runs.")
      .def(
          "predict",
          [](StagePlanner& planner, std::int64_t items, std::int64_t least) {
            return read_only(planner.predict(items, least));
          },
          "items"_a, "least_items"_a, "What a prediction runs.")
      .def_property_readonly("measures", &StagePlanner::measures, "Whether the next step measures blocks.")
      .def_property_readonly("recorded", &StagePlanner::recorded, "How many steps that measure are known.")
      .def("record_samples", &record_samples, "samples"_a, "bytes"_a, "classes"_a,
           "A step that measured: (block, device, whether backward, items, seconds) each; set_bytes; and a number for "
           "each block, equal for those of one class.")
      .def("record", &record_actions, "stages"_a, "excluded"_a,
           "What ran of the last plan, as PipelineOutcome.record. excluded: it says nothing about the devices.")
      .def("set_least_items", &StagePlanner::set_least_items, "items"_a,
           "From the next plan on, every micro-batch has at least so many items, unless the batch has fewer.")
      .def("set_bytes", &set_bytes, "bytes"_a,
           "What blocks take of memory: of parameters, and per item what is saved, what comes in, and what they need "
           "while they run.")
      .def(
          "set_link",
          [](StagePlanner& planner, double latency, double bytes_per_second) {
            planner.set_link({latency, bytes_per_second});
          },
          "latency_seconds"_a, "bytes_per_second"_a, "For what is planned after blocks were measured.")
      .def("measure_again", &StagePlanner::measure_again, "Nothing that was measured of blocks holds any more.")
      .def(
          "know",
          [](StagePlanner& planner, std::vector<plan::BlockCost> blocks, const std::vector<double>& speeds) {
            planner.know(std::move(blocks), speeds);
          },
          "blocks"_a, "speeds"_a, "Plan all steps from now on with these costs and speeds.")
      .def_property_readonly(
          "known",
          [](const StagePlanner& planner) { return std::pair(planner.known().blocks, speeds_of(planner.known())); },
          "What was measured at first: the costs of blocks on a device of speed 1, and the speeds.")
      .def("out_of_memory", &StagePlanner::out_of_memory, "stage"_a,
           "After a stage ran out of memory: whether there is another plan.")
      .def("out_of_memory_predicting", &StagePlanner::out_of_memory_predicting, "items"_a,
           "The same of a prediction with this largest micro-batch.")
      .def("retire", &StagePlanner::retire, "device"_a, "The device gets no stage from the next plan on.")
      .def("restore", &StagePlanner::restore, "device"_a, "It may get one again.")
      .def_property_readonly("moves", &StagePlanner::move_count, "Changes of cuts or devices so far.")
      .def_property_readonly(
          "recent_moves", [](const StagePlanner& planner) { return move_dicts(planner.recent_moves()); },
          "The last 16 changes, oldest first.")
      .def_property_readonly(
          "speeds", [](const StagePlanner& planner) { return speeds_of(planner.balancer().problem()); },
          "Of each device, as measured by now.")
      .def("explain", &StagePlanner::explain, "Which stage sets the pace, bubble, bytes, what would help.")
      .def("layouts", &layouts, "batch_size"_a, py::kw_only(), "micro_batches"_a = py::none(), "overlap"_a = 0.0,
           "weight_bytes"_a = py::none(), "gradient_bytes"_a = py::none(),
           R"(Rank all ways of laying out the model, by what is known of its blocks and devices.

Parameters
----------
batch_size
    Items of a step.
micro_batches
    Of a step in pipelines. Default: planned.
overlap
    The part of a reduction of gradients that is hidden behind computing, from 0 to 1.
weight_bytes, gradient_bytes
    Per block, the parts of its parameter bytes that are not the optimizer's state. Default: a quarter each, as with Adam.

Returns
-------
list of dict
    Those that fit first, the best first. `kind` is "data parallel", "pipeline" or "replicas of pipelines". `seconds` of a step,
    `reduction_seconds` of it that nothing hides, and `bubble`, the idle part of the computing time. `bytes` and `items` per
    device, `pipelines` with one plan each, and `reason`, a sentence with the numbers that decide.

Raises
------
InvalidArgument
    For invalid arguments. What does not fit is no error.)");
  bind_log(module);
}

}  // namespace paceline::python

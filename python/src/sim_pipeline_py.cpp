// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/sim/pipeline.hpp>

#include "bindings.hpp"
#include "device_arguments.hpp"
#include "stage_moves.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using namespace sim;

using ThrottleTuple = std::tuple<std::size_t, double, std::int64_t, std::int64_t>;

/// A plan, and how a step of it would run without noise.
struct Planned {
  plan::StagePlan plan;
  PipelineOutcome step;
  std::string does_not_fit = {};
};

struct Comparison {
  Planned planned;
  std::optional<Planned> one_f_one_b;  // on the even cut; none: there are fewer blocks than devices
  std::optional<Planned> gpipe;
  std::optional<PipelineSimulationResult> run;
  std::vector<std::string> devices;
};

py::dict dict_of_planned(const Planned& planned, const std::vector<std::string>& devices) {
  const plan::StagePlan& plan = planned.plan;
  py::list stages;
  for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
    py::list actions;
    for (std::size_t a = 0; a < planned.step.actions[i].size(); ++a) {
      const plan::Action& action = plan.schedule.stages[i][a];
      const plan::ActionSpan& span = planned.step.actions[i][a];
      actions.append(py::make_tuple(action.kind == plan::Action::Kind::forward ? "forward" : "backward",
                                    action.micro_batch, span.start, span.finish));
    }
    stages.append(py::dict("device"_a = devices[plan.order[i]], "first_block"_a = plan.cuts[i],
                           "in_flight"_a = plan::in_flight(plan.schedule, i), "bytes"_a = plan.bytes[i],
                           "actions"_a = actions));
  }
  return py::dict("seconds"_a = plan.seconds, "ideal_seconds"_a = plan.ideal_seconds,
                  "bound_seconds"_a = plan.bound_seconds, "bubble"_a = planned.step.bubble, "sizes"_a = plan.sizes,
                  "schedule"_a = plan::to_text(plan.schedule), "stages"_a = stages,
                  "does_not_fit"_a = planned.does_not_fit.empty() ? std::nullopt : std::optional(planned.does_not_fit));
}

py::dict dict_of_run(const PipelineSimulationResult& run) {
  return py::dict("elapsed_seconds"_a = run.elapsed_seconds, "unmoved_seconds"_a = run.unmoved_seconds,
                  "oracle_seconds"_a = run.oracle_seconds, "step_seconds"_a = run.step_seconds,
                  "moves"_a = move_dicts(run.moves), "explanation"_a = run.explanation);
}

/// The even cut. If it does not fit, how it would run with enough memory.
std::optional<Planned> even(plan::StageProblem problem, std::int64_t micro_batches, bool gpipe,
                            const PipelineBox& quiet) {
  if (problem.blocks.size() < problem.devices.size()) return std::nullopt;
  std::string does_not_fit;
  try {
    (void)even_pipeline(problem, micro_batches, gpipe);
  } catch (const OutOfMemory& error) {
    does_not_fit = error.what();
    for (plan::StageDevice& device : problem.devices) device.memory_bytes = plan::StageDevice::kUnlimitedBytes;
  }
  plan::StagePlan plan = even_pipeline(problem, micro_batches, gpipe);
  PipelineOutcome step = quiet.run(0, plan);
  return Planned{std::move(plan), std::move(step), std::move(does_not_fit)};
}

Comparison compare(const PipelineSimulationOptions& options) {
  const plan::StageProblem& problem = options.pipeline.problem;
  Comparison out;
  for (const plan::StageDevice& device : problem.devices) out.devices.push_back(device.name);
  PipelineOptions silent{.problem = problem};
  for (plan::StageDevice& device : silent.problem.devices) device.noise = 0.0;
  const PipelineBox quiet(silent);
  out.planned.plan = plan::plan_stages(problem, options.plan);
  out.planned.step = quiet.run(0, out.planned.plan);
  const auto micro_batches = static_cast<std::int64_t>(out.planned.plan.sizes.size());
  out.one_f_one_b = even(problem, micro_batches, false, quiet);
  out.gpipe = even(problem, micro_batches, true, quiet);
  if (options.steps > 0) out.run = simulate_pipeline(options);
  return out;
}

py::dict simulate_pipeline_py(const std::vector<double>& speeds, std::size_t blocks, std::int64_t batch_size,
                              const std::optional<std::int64_t>& micro_batches, std::int64_t steps,
                              double fixed_seconds, double per_item_seconds,
                              const std::optional<std::vector<std::int64_t>>& memory_bytes,
                              std::int64_t parameter_bytes, std::int64_t saved_bytes_per_item,
                              std::int64_t boundary_bytes_per_item, double link_bytes_per_second,
                              double first_run_seconds, double noise, const std::vector<ThrottleTuple>& throttles,
                              std::uint64_t seed) {
  if (blocks == 0) throw InvalidArgument("blocks is 0: a model to cut has at least one");
  if (memory_bytes) require_size(memory_bytes->size(), speeds.size(), "memory_bytes", "device");
  PipelineSimulationOptions options;
  plan::StageProblem& problem = options.pipeline.problem;
  const auto count = static_cast<double>(blocks);
  const auto whole = static_cast<std::int64_t>(blocks);
  // A backward takes twice as long as a forward: it has the gradients of inputs and of parameters to compute.
  problem.blocks.assign(blocks, {.forward_fixed = fixed_seconds / count / 3.0,
                                 .forward_per_item = per_item_seconds / count / 3.0,
                                 .backward_fixed = fixed_seconds / count * 2.0 / 3.0,
                                 .backward_per_item = per_item_seconds / count * 2.0 / 3.0,
                                 .parameter_bytes = parameter_bytes / whole,
                                 .saved_bytes_per_item = saved_bytes_per_item / whole,
                                 .boundary_bytes_per_item = boundary_bytes_per_item});
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    problem.devices.push_back({.name = fmt::format("sim:{}", i),
                               .speed = speeds[i],
                               .noise = noise,
                               .memory_bytes = memory_bytes ? (*memory_bytes)[i] : plan::StageDevice::kUnlimitedBytes,
                               .memory_space = link_bytes_per_second > 0.0 ? i : 0});
  }
  problem.batch_size = batch_size;
  problem.link.bytes_per_second = link_bytes_per_second;
  options.plan.micro_batches = micro_batches;
  options.move_cost.first_run_seconds = first_run_seconds;
  options.steps = steps;
  options.pipeline.seed = seed;
  for (const auto& [device, factor, from, to] : throttles) {
    options.pipeline.throttles.push_back({.device = device, .factor = factor, .from = from, .to = to});
  }
  const Comparison found = [&] {
    const BlockingRegion release;
    return compare(options);
  }();
  const auto or_none = [&](const std::optional<Planned>& plan) {
    return plan ? std::optional(dict_of_planned(*plan, found.devices)) : std::nullopt;
  };
  return py::dict("planned"_a = dict_of_planned(found.planned, found.devices),
                  "one_f_one_b"_a = or_none(found.one_f_one_b), "gpipe"_a = or_none(found.gpipe),
                  "run"_a = found.run ? std::optional(dict_of_run(*found.run)) : std::nullopt);
}

}  // namespace

void bind_sim_pipeline(py::module_& module) {
  module.def("simulate_pipeline", &simulate_pipeline_py, "speeds"_a, py::kw_only(), "blocks"_a = 24,
             "batch_size"_a = 512, "micro_batches"_a = py::none(), "steps"_a = 0, "fixed_seconds"_a = 0.004,
             "per_item_seconds"_a = 0.0001, "memory_bytes"_a = py::none(), "parameter_bytes"_a = 0,
             "saved_bytes_per_item"_a = 0, "boundary_bytes_per_item"_a = 0, "link_bytes_per_second"_a = 0.0,
             "first_run_seconds"_a = 0.0, "noise"_a = 0.0, "throttles"_a = std::vector<ThrottleTuple>{}, "seed"_a = 0,
             R"(Plan a pipeline for simulated devices, and run it with its balancer on a virtual clock.

Deterministic: equal arguments give equal results.

Parameters
----------
speeds
    One speed per device.
blocks
    The number of equal blocks between which the model may be cut.
batch_size
    Items per step.
micro_batches
    Their number. Default: planned.
steps
    The number of simulated steps. 0: only plan.
fixed_seconds, per_item_seconds
    What a micro-batch takes in the whole model on a device of speed 1: fixed + per item. A third of it is forward.
memory_bytes
    One limit per device. Default: none.
parameter_bytes
    Of the whole model: parameters, gradients and optimizer state.
saved_bytes_per_item
    What the whole model keeps of an item from forward to backward.
boundary_bytes_per_item, link_bytes_per_second
    What is sent of an item from a stage to the next, and how fast. 0 bytes per second: all devices share one memory, so that
    sends and moves of blocks take no time.
first_run_seconds
    What the first step after a move of blocks between memories takes longer.
noise
    The relative standard deviation of the time of an action.
throttles
    (device, factor, from, to): the device takes `factor` times as long in steps [from, to).
seed
    The seed of the noise.

Returns
-------
dict
    `planned`, and `one_f_one_b` and `gpipe` on the even cut: each a dict with `seconds` of a step, `ideal_seconds`,
    `bound_seconds`, `bubble` (a fraction of the step), `sizes` of micro-batches, `schedule`, `stages`, and `does_not_fit`: None, or
    a str that says which stage of the even cut needs more memory than it has; the figures are then those with enough memory. The
    even cut is None if there are fewer blocks than devices. A stage has `device`, `first_block`, `in_flight`, `bytes` and `actions`:
    (kind, micro-batch, start, finish) in seconds. `run` is None, or a dict of the simulated steps: `elapsed_seconds`; `unmoved_seconds` with the
    first plan throughout; `oracle_seconds` with the best plan at each step; `step_seconds`, `moves` and `explanation`.

Raises
------
InvalidArgument
    For invalid arguments. The message names the device or throttle.
OutOfMemory
    If no plan fits.)");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/error.hpp>

#include "bindings.hpp"
#include "stage_moves.hpp"
#include "stage_plan.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using balance::StageBalancer;
using balance::StageMove;

/// Seconds of a forward (fixed, per item) and a backward (fixed, per item); bytes of parameters, then per item what is
/// saved, sent and used while it runs.
using Block = std::tuple<double, double, double, double, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
/// Name, speed, noise, bytes of memory or none, memory space.
using StageDeviceTuple = std::tuple<std::string, double, double, std::optional<std::int64_t>, std::size_t>;
using StageTiming = std::tuple<std::vector<double>, std::vector<double>, bool>;

plan::StageOptions::Kind schedule_kind(const std::string& name) {
  if (name == "auto") return plan::StageOptions::Kind::automatic;
  if (name == "gpipe") return plan::StageOptions::Kind::gpipe;
  if (name == "1f1b") return plan::StageOptions::Kind::one_f_one_b;
  throw InvalidArgument("there is no schedule '" + name + "'; use 'auto', 'gpipe' or '1f1b'.");
}

std::unique_ptr<StageBalancer> make_stage_balancer(
    const std::vector<Block>& blocks, const std::vector<StageDeviceTuple>& devices, std::pair<double, double> link,
    std::int64_t tied_bytes, const std::optional<std::int64_t>& micro_batches, const std::vector<std::size_t>& cuts,
    const std::vector<std::size_t>& order, const std::string& schedule, double first_run_seconds) {
  plan::StageProblem problem;
  for (const auto& [forward_fixed, forward, backward_fixed, backward, parameters, saved, boundary, workspace] :
       blocks) {
    plan::BlockCost& block = problem.blocks.emplace_back();
    block.forward_fixed = forward_fixed;
    block.forward_per_item = forward;
    block.backward_fixed = backward_fixed;
    block.backward_per_item = backward;
    block.parameter_bytes = parameters;
    block.saved_bytes_per_item = saved;
    block.boundary_bytes_per_item = boundary;
    block.workspace_bytes_per_item = workspace;
  }
  for (const auto& [name, speed, noise, memory, space] : devices) {
    problem.devices.push_back({.name = name,
                               .speed = speed,
                               .noise = noise,
                               .memory_bytes = memory.value_or(plan::StageDevice::kUnlimitedBytes),
                               .memory_space = space});
  }
  problem.link = {.latency_seconds = link.first, .bytes_per_second = link.second};
  problem.tied_bytes = tied_bytes;
  plan::StageOptions options;
  options.micro_batches = micro_batches;
  options.cuts = cuts;
  options.order = order;
  options.schedule = schedule_kind(schedule);
  return std::make_unique<StageBalancer>(std::move(problem), std::move(options),
                                         balance::MoveCost{.first_run_seconds = first_run_seconds});
}

py::list moves_of(const StageBalancer& balancer) {
  py::list moves;
  for (const StageMove& move : balancer.recent_moves()) {
    py::dict dict;
    dict["kind"] = name_of(move.kind);
    dict["step"] = move.step;
    dict["from_cuts"] = move.from_cuts;
    dict["to_cuts"] = move.to_cuts;
    dict["from_order"] = move.from_order;
    dict["to_order"] = move.to_order;
    dict["seconds_before"] = move.seconds_before;
    dict["seconds_after"] = move.seconds_after;
    dict["moved_bytes"] = move.moved_bytes;
    dict["reason"] = move.reason;
    moves.append(dict);
  }
  return moves;
}

void record_stages(StageBalancer& balancer, const std::vector<StageTiming>& stages) {
  std::vector<balance::StageTimings> timings;
  for (const auto& [forwards, backwards, excluded] : stages) timings.push_back({forwards, backwards, excluded});
  balancer.record(timings);
}

}  // namespace

py::dict dict_of(const plan::StagePlan& plan) {
  py::dict dict;
  dict["cuts"] = plan.cuts;
  dict["order"] = plan.order;
  dict["sizes"] = plan.sizes;
  dict["schedule"] = plan::to_text(plan.schedule);
  dict["bytes"] = plan.bytes;
  dict["seconds"] = plan.seconds;
  dict["ideal_seconds"] = plan.ideal_seconds;
  dict["bound_seconds"] = plan.bound_seconds;
  py::list times;
  for (const plan::StageTimes& one : plan.times) {
    times.append(py::make_tuple(one.forward, one.backward, one.send_forward, one.send_backward));
  }
  dict["times"] = times;
  return dict;
}

void bind_stage_balancer(py::module_& module) {
  py::class_<StageBalancer>(module, "StageBalancer", "The closed loop of a pipeline: times of stages in, plans out.")
      .def(py::init(&make_stage_balancer), py::arg("blocks"), py::arg("devices"), py::kw_only(),
           py::arg("link") = std::pair(0.0, 0.0), py::arg("tied_bytes") = 0, py::arg("micro_batches") = py::none(),
           py::arg("cuts") = std::vector<std::size_t>{}, py::arg("order") = std::vector<std::size_t>{},
           py::arg("schedule") = "auto", py::arg("first_run_seconds") = 0.0)
      .def(
          "plan", [](StageBalancer& balancer, std::int64_t items) { return dict_of(balancer.plan(items)); },
          py::arg("batch_size"), "What the next step runs.")
      .def("set_least_items", &StageBalancer::set_least_items, py::arg("items"),
           "From the next plan on, every micro-batch has at least so many items, unless the batch has fewer.")
      .def(
          "record", &record_stages, py::arg("stages"),
          "The times of the last plan: per stage (seconds of its forwards, of its backwards, whether to exclude them).")
      .def("out_of_memory", &StageBalancer::out_of_memory, py::arg("stage"),
           "After a stage ran out of memory: whether there is another plan.")
      .def("retire", &StageBalancer::retire, py::arg("device"), "The device gets no stage from the next plan on.")
      .def("restore", &StageBalancer::restore, py::arg("device"), "It may get one again.")
      .def_property_readonly("moves", &StageBalancer::move_count, "Changes of cuts or devices so far.")
      .def_property_readonly("recent_moves", &moves_of, "The last 16 changes, oldest first.")
      .def_property_readonly(
          "speeds",
          [](const StageBalancer& balancer) {
            std::vector<double> speeds;
            for (const plan::StageDevice& device : balancer.problem().devices) speeds.push_back(device.speed);
            return speeds;
          },
          "Of each device, as measured, in the units of the problem.")
      .def_property_readonly(
          "noise",
          [](const StageBalancer& balancer) {
            std::vector<double> noise;
            for (const plan::StageDevice& device : balancer.problem().devices) noise.push_back(device.noise);
            return noise;
          },
          "Of each device: the relative standard deviation of an action's time.")
      .def("explain", &StageBalancer::explain, py::arg("steps_before") = 0,
           "Which stage sets the pace, bubble, bytes, what would help.");
  bind_layouts(module);
}

}  // namespace paceline::python

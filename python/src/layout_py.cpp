// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/layout.hpp>

#include "bindings.hpp"
#include "stage_plan.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using Bytes = std::optional<std::vector<std::int64_t>>;

py::dict dict_of_layout(const plan::Layout& layout) {
  py::list pipelines;
  for (const plan::StagePlan& plan : layout.pipelines) pipelines.append(dict_of(plan));
  py::dict dict;
  dict["kind"] = std::string(plan::name_of(layout.kind));
  dict["fits"] = layout.fits;
  dict["seconds"] = layout.seconds;
  dict["reduction_seconds"] = layout.reduction_seconds;
  dict["bubble"] = layout.bubble;
  dict["bytes"] = layout.bytes;
  dict["items"] = layout.items;
  dict["pipelines"] = pipelines;
  dict["reason"] = layout.reason;
  return dict;
}

py::list layouts(const balance::StageBalancer& balancer, std::int64_t batch_size,
                 const std::optional<std::int64_t>& micro_batches, double overlap, const Bytes& weight_bytes,
                 const Bytes& gradient_bytes) {
  plan::StageProblem problem = balancer.problem();
  problem.batch_size = batch_size;
  const auto set = [&](const Bytes& given, const char* name, std::int64_t plan::BlockCost::* member) {
    if (!given) return;
    if (given->size() != problem.blocks.size()) {
      throw InvalidArgument(fmt::format("{} is of length {} instead of {}; pass one per block", name, given->size(),
                                        problem.blocks.size()));
    }
    for (std::size_t i = 0; i < given->size(); ++i) problem.blocks[i].*member = (*given)[i];
  };
  set(weight_bytes, "weight_bytes", &plan::BlockCost::weight_bytes);
  set(gradient_bytes, "gradient_bytes", &plan::BlockCost::gradient_bytes);
  plan::LayoutOptions options;
  options.stages.micro_batches = micro_batches;
  options.overlap = overlap;
  const std::vector<plan::Layout> found = [&] {
    const py::gil_scoped_release release;
    return plan::plan_layouts(problem, options);
  }();
  py::list out;
  for (const plan::Layout& layout : found) out.append(dict_of_layout(layout));
  return out;
}

}  // namespace

void bind_layouts(py::module_& module) {
  module.def("layouts", &layouts, py::arg("balancer"), py::arg("batch_size"), py::kw_only(),
             py::arg("micro_batches") = py::none(), py::arg("overlap") = 0.0, py::arg("weight_bytes") = py::none(),
             py::arg("gradient_bytes") = py::none(),
             R"(Rank all ways of laying out a model, by what a `StageBalancer` knows of its blocks and devices.

Parameters
----------
balancer
    What was measured. Nothing changes.
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
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/item_cost.hpp>
#include <paceline/plan/items.hpp>
#include <paceline/plan/padded_items.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "device_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using plan::CostModel;
using plan::ItemCost;
using plan::ItemCostFit;
using plan::ItemSample;
using plan::ItemSplit;
using plan::LoadModel;

using Model = std::variant<CostModel, std::pair<double, double>>;

std::vector<LoadModel> load_models_of(const std::vector<Model>& given) {
  std::vector<LoadModel> models;
  for (const Model& model : given) {
    if (const auto* line = std::get_if<CostModel>(&model)) {
      models.push_back({line->fixed_seconds(), line->per_item_seconds()});
    } else {
      const auto& [fixed, per_cost] = std::get<1>(model);
      models.push_back({fixed, per_cost});
    }
  }
  return models;
}

ItemCostFit fit_item_cost(const std::vector<double>& tokens, const std::vector<double>& seconds,
                          const std::optional<std::vector<std::int64_t>>& devices,
                          const std::optional<std::vector<double>>& squared_tokens) {
  const auto require = [&](const auto& values, const char* name) {
    require_size(values.size(), tokens.size(), name, "sample");
  };
  require(seconds, "seconds");
  if (devices) require(*devices, "devices");
  if (squared_tokens) require(*squared_tokens, "squared_tokens");
  std::vector<ItemSample> samples;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    samples.push_back({.tokens = tokens[i],
                       .seconds = seconds[i],
                       .device = devices ? (*devices)[i] : 0,
                       .squared_tokens = squared_tokens ? (*squared_tokens)[i] : 0.0});
  }
  return plan::fit_item_cost(samples);
}

std::vector<std::pair<double, double>> fitted_models(const ItemCostFit& fit) {
  std::vector<std::pair<double, double>> models;
  for (std::size_t device = 0; device < fit.scales.size(); ++device) {
    const LoadModel model = fit.load_model(device);
    models.emplace_back(model.fixed_seconds, model.seconds_per_cost);
  }
  return models;
}

void bind_split(py::module_& module) {
  py::class_<ItemSplit>(module, "ItemSplit",
                        "The items of each device, and when the models expect the last device to finish.")
      .def_readonly("items", &ItemSplit::items, "Per device, the indices of its items, ascending.")
      .def_readonly("loads", &ItemSplit::loads,
                    "Per device, the sum of its items' costs; for `split_padded`, their count times the largest cost.")
      .def_readonly("makespan_seconds", &ItemSplit::makespan_seconds,
                    "When the models expect the last device to finish.")
      .def_readonly("lower_bound_seconds", &ItemSplit::lower_bound_seconds,
                    "No split has a smaller makespan. Equal to the makespan if the split is proven best.")
      .def_property_readonly("gap", &ItemSplit::gap, "(makespan - lower bound) / lower bound.")
      .def("__repr__", [](const ItemSplit& split) {
        return fmt::format("ItemSplit(items={}, makespan_seconds={}, gap={:.3g})", repr_of(split.items),
                           repr_of(split.makespan_seconds), split.gap());
      });

  module.def(
      "split_items",
      [](const std::vector<double>& costs, const std::vector<Model>& models, double tolerance) {
        return plan::split_items(costs, load_models_of(models), tolerance);
      },
      "costs"_a, "models"_a, py::kw_only(), "tolerance"_a = plan::kItemTolerance, py::call_guard<BlockingRegion>(),
      R"(Split items of unequal cost so that the last device finishes as early as possible.

Parameters
----------
costs
    The cost of each item, 0 or more, in any unit that adds up: tokens, squared tokens, `ItemCostFit.item_seconds`.
models
    One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`. A device without items takes no time.
tolerance
    The search ends once the makespan is within this fraction of the lower bound.

Returns
-------
ItemSplit
    Every item on exactly one device. Deterministic; ties go to the lower index.

Raises
------
InvalidArgument
    For invalid arguments.

Notes
-----
Longest processing time on unequal speeds (Gonzalez, Ibarra & Sahni 1977), then exchanges between the latest device and
others. Up to 16 items, a bounded depth-first search follows (Korf 1998), which usually finds the optimum.

Examples
--------
>>> from paceline.plan import split_items
>>> split_items([5, 5, 4, 3, 3], [(0, 1), (0, 1)]).items
[[0, 1], [2, 3, 4]])");

  module.def(
      "split_padded",
      [](const std::vector<double>& costs, const std::vector<Model>& models) {
        return plan::split_padded(costs, load_models_of(models));
      },
      "costs"_a, "models"_a, py::call_guard<BlockingRegion>(),
      R"(Split items over devices that pad their items to the longest, so that the last device finishes as early as possible.

A device runs all its items in one padded batch. With n items, the costliest of cost c, it takes
fixed_seconds + seconds_per_cost * n * c. Without padding, where costs add up, use `split_items`.

Parameters
----------
costs
    The cost of each item, 0 or more, when padded to its own length; for example its tokens.
models
    One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`. For a known speed, use (0, 1 / speed).

Returns
-------
ItemSplit
    Every item on exactly one device, and at least one item on each device if there are enough. `loads` are n * c. A device's
    items are neighbours in order of cost. Deterministic; among equal devices the lower index gets the longer items.

Raises
------
InvalidArgument
    For invalid arguments.

Notes
-----
Dynamic programming over the order of the devices finds the exact minimum of all splits that give every device an item. It is exact
up to 12 devices, and beyond as long as there are at most 4096 ways to choose how many devices of each model come first. Beyond
that, the devices that differ least count as equal, and `gap` shows how far the result may be from the best.

Examples
--------
>>> from paceline.plan import split_padded
>>> split_padded([2, 9, 3, 1, 2, 8, 3, 2], [(0, 1), (0, 1)]).items
[[1, 5], [0, 2, 3, 4, 6, 7]])");
}

void bind_fit(py::module_& module) {
  py::class_<ItemCostFit>(
      module, "ItemCostFit",
      R"(The cost of an item, learned from timings: one shape shared by all devices, and a scale per device.

The coefficients are those of the fastest device: a micro-batch takes fixed_seconds + per_token_seconds * tokens +
per_squared_token_seconds * (sum of squared lengths).)")
      .def_property_readonly(
          "fixed_seconds", [](const ItemCostFit& fit) { return fit.shape.fixed_seconds; },
          "Seconds of a micro-batch that do not depend on its tokens.")
      .def_property_readonly(
          "per_token_seconds", [](const ItemCostFit& fit) { return fit.shape.per_token_seconds; },
          "Seconds that each further token costs.")
      .def_property_readonly(
          "per_squared_token_seconds", [](const ItemCostFit& fit) { return fit.shape.per_squared_token_seconds; },
          "Seconds per unit of the sum of squared lengths (attention).")
      .def_readonly("scales", &ItemCostFit::scales,
                    "Per device, its time relative to the fastest device; 0 for a device without samples.")
      .def_readonly("relative_rms", &ItemCostFit::relative_rms,
                    "Root mean square of (predicted - measured) / measured over the samples.")
      .def_property_readonly("models", &fitted_models,
                             "Per device, the pair (fixed_seconds, seconds_per_cost) for `split_items`.")
      .def(
          "item_seconds", [](const ItemCostFit& fit, double tokens) { return fit.shape.item_seconds(tokens); },
          "tokens"_a,
          "Seconds that one more item of this length adds on the fastest device: its cost for `split_items`.")
      .def("__repr__", [](const ItemCostFit& fit) {
        return fmt::format(
            "ItemCostFit(fixed_seconds={:.6g}, per_token_seconds={:.6g}, per_squared_token_seconds={:.6g}, scales={}, "
            "relative_rms={:.3g})",
            fit.shape.fixed_seconds, fit.shape.per_token_seconds, fit.shape.per_squared_token_seconds,
            repr_of(fit.scales), fit.relative_rms);
      });

  module.def("fit_item_cost", &fit_item_cost, "tokens"_a, "seconds"_a, py::kw_only(), "devices"_a = py::none(),
             "squared_tokens"_a = py::none(),
             R"(Learn the cost of an item from timed micro-batches, by nonnegative least squares of the relative error.

Parameters
----------
tokens
    Tokens of each micro-batch, summed over its items.
seconds
    Seconds of each micro-batch, above 0.
devices
    The index of the device that ran each micro-batch, from 0. None: one device ran all.
squared_tokens
    For each micro-batch, the sum of its items' squared lengths. None: each micro-batch was a single item.

Returns
-------
ItemCostFit
    The shape shared by the devices, their scales, and the error.

Raises
------
InvalidArgument
    Without samples, and for numbers that cannot be measurements.

Notes
-----
The samples must vary to separate the terms: if all have one length, the whole time counts as fixed seconds.

Examples
--------
>>> from paceline.plan import fit_item_cost
>>> fit = fit_item_cost([100, 200, 400], [0.2, 0.3, 0.5])
>>> round(fit.fixed_seconds, 6), round(fit.per_token_seconds, 6), round(fit.relative_rms, 6)
(0.1, 0.001, 0.0))");
}

}  // namespace

void bind_plan_items(py::module_& module) {
  bind_split(module);
  bind_fit(module);
}

}  // namespace paceline::python

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

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
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
    if (const auto* pair = std::get_if<1>(&model)) {
      models.push_back({pair->first, pair->second});
      continue;
    }
    const CostModel& line = std::get<0>(model);
    models.push_back({line.fixed_seconds(), line.per_item_seconds()});
  }
  return models;
}

ItemSplit split_items(const std::vector<double>& costs, const std::vector<Model>& models, double tolerance) {
  const std::vector<LoadModel> loads = load_models_of(models);
  const py::gil_scoped_release released;
  return plan::split_items(costs, loads, tolerance);
}

ItemSplit split_padded(const std::vector<double>& costs, const std::vector<Model>& models) {
  const std::vector<LoadModel> loads = load_models_of(models);
  const py::gil_scoped_release released;
  return plan::split_padded(costs, loads);
}

ItemCostFit fit_item_cost(const std::vector<double>& tokens, const std::vector<double>& seconds,
                          const std::optional<std::vector<std::int64_t>>& devices,
                          const std::optional<std::vector<double>>& squared_tokens) {
  const auto require_size = [&](std::size_t size, const char* name) {
    if (size == tokens.size()) return;
    throw InvalidArgument(
        fmt::format("{} is of length {} instead of {}; pass one per sample", name, size, tokens.size()));
  };
  require_size(seconds.size(), "seconds");
  if (devices) require_size(devices->size(), "devices");
  if (squared_tokens) require_size(squared_tokens->size(), "squared_tokens");
  std::vector<ItemSample> samples;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    samples.push_back({.tokens = tokens[i],
                       .seconds = seconds[i],
                       .device = devices ? (*devices)[i] : 0,
                       .squared_tokens = squared_tokens ? (*squared_tokens)[i] : 0.0});
  }
  return plan::fit_item_cost(samples);
}

std::vector<std::pair<double, double>> models_of(const ItemCostFit& fit) {
  std::vector<std::pair<double, double>> models;
  for (std::size_t device = 0; device < fit.scales.size(); ++device) {
    const LoadModel model = fit.load_model(device);
    models.emplace_back(model.fixed_seconds, model.seconds_per_cost);
  }
  return models;
}

template <class Value>
std::string repr_of(const Value& value) {
  return std::string(py::repr(py::cast(value)));
}

void bind_split(py::module_& module) {
  py::class_<ItemSplit>(module, "ItemSplit", "Which device gets which items, and when the last one will be done.")
      .def_readonly("items", &ItemSplit::items, "Per device, the indices of its items, ascending.")
      .def_readonly("loads", &ItemSplit::loads,
                    "Per device, the sum of its items' costs; of `split_padded` their count times the largest cost.")
      .def_readonly("makespan_seconds", &ItemSplit::makespan_seconds, "When the last device finishes, by the models.")
      .def_readonly("lower_bound_seconds", &ItemSplit::lower_bound_seconds,
                    "No split has a smaller makespan; equal to it when the split is proven best.")
      .def_property_readonly("gap", &ItemSplit::gap, "(makespan - lower bound) / lower bound.")
      .def("__repr__", [](const ItemSplit& split) {
        return fmt::format("ItemSplit(items={}, makespan_seconds={}, gap={:.3g})", repr_of(split.items),
                           repr_of(split.makespan_seconds), split.gap());
      });

  module.def("split_items", &split_items, py::arg("costs"), py::arg("models"), py::kw_only(),
             py::arg("tolerance") = plan::kItemTolerance,
             R"(Split items that do not cost the same, so that the last device finishes as early as possible.

Parameters
----------
costs
    What each item costs, not negative: tokens, squared tokens, `ItemCostFit.item_seconds`, anything that adds up.
models
    One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`. A device without items costs nothing.
tolerance
    The search ends once the makespan is within this part of the lower bound.

Returns
-------
ItemSplit
    Every item on exactly one device; deterministic, ties go to the lower index.

Raises
------
InvalidArgument
    For arguments that make no sense.

Notes
-----
Longest processing time on unequal speeds (Gonzalez, Ibarra & Sahni 1977), then exchanges between the latest device and
others. Up to 16 items a bounded depth-first search follows (Korf 1998), which mostly finds the optimum.

Examples
--------
>>> from paceline.plan import split_items
>>> split_items([5, 5, 4, 3, 3], [(0, 1), (0, 1)]).items
[[0, 1], [2, 3, 4]])");
}

void bind_padded(py::module_& module) {
  module.def(
      "split_padded", &split_padded, py::arg("costs"), py::arg("models"),
      R"(Split items over devices that pad theirs to the longest of them, so that the last device finishes as early as possible.

A device that gets n items, the costliest of cost c, takes fixed_seconds + seconds_per_cost * n * c: all its items in one
batch, padded. Where nothing is padded, and costs add up, use `split_items`.

Parameters
----------
costs
    What each item costs, not negative: what one item padded to its length takes, e.g. tokens.
models
    One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`; for a speed, (0, 1 / speed).

Returns
-------
ItemSplit
    Every item on exactly one device, and at least one on each if there are enough; `loads` are n * c. A device's items are
    neighbours in order of cost. Deterministic; among equal devices the lower index gets the longer items.

Raises
------
InvalidArgument
    For arguments that make no sense.

Notes
-----
The exact minimum of all splits that give every device an item, by dynamic programming over the order of the devices: up to 12
devices, and beyond while there are at most 4096 ways to choose how many of each model. For more, devices that differ least
count as alike, and `gap` shows what is not proven.

Examples
--------
>>> from paceline.plan import split_padded
>>> split_padded([2, 9, 3, 1, 2, 8, 3, 2], [(0, 1), (0, 1)]).items
[[1, 5], [0, 2, 3, 4, 6, 7]])");
}

void bind_fit(py::module_& module) {
  py::class_<ItemCostFit>(module, "ItemCostFit",
                          R"(What an item costs, learned from timings: a shape shared by all devices, a scale for each.

The coefficients are those of the fastest device: a micro-batch takes fixed_seconds + per_token_seconds * tokens +
per_squared_token_seconds * (sum of squared lengths).)")
      .def_property_readonly(
          "fixed_seconds", [](const ItemCostFit& fit) { return fit.shape.fixed_seconds; },
          "Seconds of a micro-batch that do not depend on its tokens.")
      .def_property_readonly(
          "per_token_seconds", [](const ItemCostFit& fit) { return fit.shape.per_token_seconds; },
          "Seconds each further token costs.")
      .def_property_readonly(
          "per_squared_token_seconds", [](const ItemCostFit& fit) { return fit.shape.per_squared_token_seconds; },
          "Seconds by the sum of squared lengths: attention.")
      .def_readonly("scales", &ItemCostFit::scales,
                    "Per device, how many times slower than the fastest; 0 for a device without samples.")
      .def_readonly("relative_rms", &ItemCostFit::relative_rms,
                    "Root mean square of (predicted - measured) / measured over the samples.")
      .def_property_readonly("models", &models_of,
                             "Per device the pair (fixed_seconds, seconds_per_cost) for `split_items`.")
      .def(
          "item_seconds", [](const ItemCostFit& fit, double tokens) { return fit.shape.item_seconds(tokens); },
          py::arg("tokens"),
          "What one more item of this length adds on the fastest device: its cost for `split_items`.")
      .def("__repr__", [](const ItemCostFit& fit) {
        return fmt::format(
            "ItemCostFit(fixed_seconds={:.6g}, per_token_seconds={:.6g}, per_squared_token_seconds={:.6g}, scales={}, "
            "relative_rms={:.3g})",
            fit.shape.fixed_seconds, fit.shape.per_token_seconds, fit.shape.per_squared_token_seconds,
            repr_of(fit.scales), fit.relative_rms);
      });

  module.def("fit_item_cost", &fit_item_cost, py::arg("tokens"), py::arg("seconds"), py::kw_only(),
             py::arg("devices") = py::none(), py::arg("squared_tokens") = py::none(),
             R"(Learn what an item costs from timed micro-batches, by nonnegative least squares of the relative error.

Parameters
----------
tokens
    Tokens of each micro-batch, in all its items.
seconds
    What each took, above 0.
devices
    The device each ran on, from 0; None: all on one.
squared_tokens
    For each the sum of the squared lengths of its items; None: each was a single item.

Returns
-------
ItemCostFit
    The shape shared by the devices, their scales, and the error.

Raises
------
InvalidArgument
    Without samples, and for numbers that were not measured.

Notes
-----
What the samples do not tell apart is not known: with one length only, everything is fixed seconds.

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
  bind_padded(module);
  bind_fit(module);
}

}  // namespace paceline::python

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
#include <paceline/plan/corrections.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/split.hpp>

#include "bindings.hpp"
#include "device_arguments.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using plan::CostModel;
using plan::Split;

using Model = std::variant<CostModel, std::pair<double, double>>;
std::vector<CostModel> models_of(const std::vector<Model>& given) {
  std::vector<CostModel> models;
  models.reserve(given.size());
  for (const Model& model : given) {
    const auto* line = std::get_if<1>(&model);
    models.push_back(line != nullptr ? CostModel::affine(line->first, line->second) : std::get<0>(model));
  }
  return models;
}

Split split_batch(std::int64_t batch_size, const std::vector<Model>& given,
                  const DeviceArgument<std::optional<std::int64_t>>& minimum,
                  const DeviceArgument<std::optional<std::int64_t>>& maximum, std::int64_t granularity,
                  const DeviceArgument<bool>& may_be_zero, const DeviceArgument<double>& startup_seconds,
                  const std::optional<std::vector<double>>& reduction_seconds,
                  const std::optional<std::vector<std::int64_t>>& previous) {
  const std::vector<CostModel> models = models_of(given);
  return plan::split_batch(batch_size, models,
                           {.limits = share_limits(models.size(), minimum, maximum, may_be_zero, startup_seconds),
                            .granularity = granularity,
                            .reduction_seconds = reduction_seconds.value_or(std::vector<double>{}),
                            .previous = previous.value_or(std::vector<std::int64_t>{})});
}

std::string repr(const CostModel& model) {
  return fmt::format("CostModel.affine(fixed_seconds={}, per_item_seconds={})", repr_of(model.fixed_seconds()),
                     repr_of(model.per_item_seconds()));
}

double seconds_of(const CostModel& model, std::int64_t items) {
  if (items < 0) throw InvalidArgument(fmt::format("items is {}; it cannot be negative", items));
  return model.seconds(items);
}

void bind_cost_model(py::module_& module) {
  py::class_<CostModel>(module, "CostModel", R"(Seconds that a device needs for a share of n items; nondecreasing in n.

Make one with `affine`. `CostModel()` costs nothing. Immutable.)")
      .def(py::init<>())
      .def_static("affine", &CostModel::affine, "fixed_seconds"_a, "per_item_seconds"_a,
                  R"(`fixed_seconds + per_item_seconds * n`.

Raises
------
InvalidArgument
    If a coefficient is negative or not finite.)")
      .def("seconds", &seconds_of, "items"_a, "Seconds for a share of `items` items.")
      .def("items_within", &CostModel::items_within, "budget_seconds"_a, "limit"_a,
           "The largest n in [0, limit] with seconds(n) <= budget_seconds; -1 if even n = 0 does not fit.")
      .def("scaled", &CostModel::scaled, "factor"_a, "The same shape on a device `factor` times slower.")
      .def_property_readonly("fixed_seconds", &CostModel::fixed_seconds, "Seconds that do not depend on the size.")
      .def_property_readonly("per_item_seconds", &CostModel::per_item_seconds, "Seconds that each further item costs.")
      .def(
          "__eq__", [](const CostModel& a, const CostModel& b) { return a == b; }, "other"_a, py::is_operator())
      .def("__hash__", [](const CostModel& model) { return py::hash(py::str(repr(model))); })
      .def("__repr__", &repr);
}

void bind_splits(py::module_& module) {
  py::class_<Split>(module, "Split", "The shares of one step, and when the models expect the last device to finish.")
      .def_readonly("shares", &Split::shares, "Items per device; they sum to the batch.")
      .def_readonly("makespan_seconds", &Split::makespan_seconds, "When the models expect the last device to finish.")
      .def("__repr__", [](const Split& split) {
        return fmt::format("Split(shares={}, makespan_seconds={})", repr_of(split.shares),
                           repr_of(split.makespan_seconds));
      });

  module.def("split_batch", &split_batch, "batch_size"_a, "models"_a, py::kw_only(), "minimum"_a = py::none(),
             "maximum"_a = py::none(), "granularity"_a = 1, "may_be_zero"_a = py::none(),
             "startup_seconds"_a = py::none(), "reduction_seconds"_a = py::none(), "previous"_a = py::none(),
             R"(Split a batch so that the last device finishes as early as possible: the exact integer optimum.

Parameters
----------
batch_size
    Items of the whole batch.
models
    One per device: a `CostModel`, or a pair (fixed_seconds, per_item_seconds).
minimum, maximum
    The smallest nonzero share and the largest share, for all devices or one per device. None: no limit.
granularity
    Shares are multiples of this number. If the batch is not a multiple, exactly one share has the remainder.
may_be_zero
    Whether a device may get no work (default: True), for all devices or one per device.
startup_seconds
    Seconds that a device with work spends once, for all devices or one per device.
reduction_seconds
    At index k, the seconds that the step takes longer when k devices have work; k from 0 to the number of devices.
previous
    The present shares. Among optimal splits, the one that changes the fewest devices wins; after that, lower-numbered devices win.

Returns
-------
Split
    `shares` and `makespan_seconds`.

Raises
------
InvalidArgument
    For invalid arguments, and for limits that no split can respect. The message names the constraint.

Notes
-----
Each grain goes to the device that would finish it first, which is optimal for nondecreasing costs (Ibaraki & Katoh, Resource
Allocation Problems, MIT Press 1988). With minimums above zero, subsets of devices are searched: all subsets up to 8 devices, some of them beyond.

Examples
--------
>>> from paceline.plan import split_batch
>>> split_batch(512, [(0.004, 0.0001), (0.004, 0.0003)]).shares
[384, 128])");

  module.def(
      "split_weighted",
      [](std::int64_t batch_size, const std::vector<double>& weights) {
        return plan::split_weighted(batch_size, weights);
      },
      "batch_size"_a, "weights"_a,
      R"(Shares in the ratio of `weights`, rounded by largest remainder; the lower index wins ties. A weight of zero gets nothing.

Raises
------
InvalidArgument
    If a weight is negative or not finite, or if all are zero.)");
  module.def("split_even", &plan::split_even, "batch_size"_a, "device_count"_a,
             "Shares that differ by at most one item, the larger ones first.");
  module.def(
      "correction_floor", &plan::correction_floor, "model"_a, "overhead"_a = plan::kCorrectionOverhead,
      "granularity"_a = 1,
      "The smallest micro-batch whose fixed cost is at most the fraction `overhead` of its time, rounded up to a "
      "multiple of `granularity`.");
}

}  // namespace

void bind_plan(py::module_& module) {
  module.doc() = "Pure decisions: cost models, splits of batches and of items, stages of pipelines.";
  bind_cost_model(module);
  bind_splits(module);
  bind_plan_items(module);
  bind_plan_stages(module);
  bind_pool_state(module);
  bind_pool_scale(module);
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "step_loop_reports.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;

namespace {

const char* measure_name(plan::ItemMeasure measure) {
  if (measure == plan::ItemMeasure::padded) return "padded";
  return measure == plan::ItemMeasure::sum ? "sum" : "count";
}

const char* name_of_outcome(balance::MoveOutcome outcome) {
  constexpr std::array kNames{"pending", "kept", "taken back", "overtaken", "unjudged"};
  return kNames.at(static_cast<std::size_t>(outcome));
}

}  // namespace

std::vector<std::optional<plan::CostModel>> hints_of(
    const std::vector<std::optional<std::pair<double, double>>>& pairs) {
  std::vector<std::optional<plan::CostModel>> models;
  for (const auto& pair : pairs) {
    models.emplace_back();
    if (pair) models.back() = plan::CostModel::affine(pair->first, pair->second);
  }
  return models;
}

py::list move_dicts(const std::vector<balance::MoveReport>& moves) {
  py::list dicts;
  for (const balance::MoveReport& move : moves) {
    dicts.append(py::dict("step"_a = move.step, "batch_size"_a = move.batch_size, "from"_a = move.from,
                          "to"_a = move.to, "promised_gain"_a = move.promised_gain,
                          "measured_gain"_a = move.measured_gain, "resolution"_a = move.resolution,
                          "outcome"_a = name_of_outcome(move.outcome)));
  }
  return dicts;
}

py::dict metrics_dict(const observe::Metrics& metrics, bool any_costs) {
  double most_items = 0.0;
  double most_cost = 0.0;
  for (const observe::DeviceMetrics& device : metrics.devices) {
    most_items = std::max(most_items, device.items_per_second);
    most_cost = std::max(most_cost, device.cost_per_second);
  }
  py::dict devices;
  for (const observe::DeviceMetrics& device : metrics.devices) {
    const double speed = most_cost > 0.0    ? device.cost_per_second / most_cost
                         : most_items > 0.0 ? device.items_per_second / most_items
                                            : 0.0;
    py::dict entry("share"_a = device.last_items, "items"_a = device.items, "busy_seconds"_a = device.busy_seconds,
                   "idle_seconds"_a = device.idle_seconds, "items_per_second"_a = device.items_per_second,
                   "speed"_a = speed, "retired"_a = device.retired);
    if (any_costs) {
      entry["cost"] = device.cost;
      entry["cost_per_second"] = device.cost_per_second;
    }
    devices[py::str(device.name)] = entry;
  }
  py::list counts;  // cumulative, as Prometheus has them
  std::int64_t count = 0;
  for (std::size_t k = 0; k < observe::kStepBounds.size(); ++k) {
    count += metrics.step_counts[k];
    counts.append(py::make_tuple(observe::kStepBounds[k], count));
  }
  return py::dict("devices"_a = devices, "steps"_a = metrics.steps, "moves"_a = metrics.moves,
                  "imbalance"_a = metrics.imbalance, "compute_seconds"_a = metrics.compute_seconds,
                  "step_seconds"_a = metrics.step_seconds, "step_counts"_a = counts);
}

py::dict metrics_dict(StepLoop& step_loop) {
  step_loop.settle();
  py::dict metrics = metrics_dict(step_loop.metrics(), step_loop.item_report().has_value());
  const balance::BalanceReport decided = step_loop.balancer().report();
  metrics["taken_back"] = decided.taken_back;
  metrics["recent_moves"] = move_dicts(decided.recent_moves);
  for (const balance::DeviceReport& device : decided.devices) {
    const py::object entry = metrics["devices"][py::str(device.name)];
    if (!step_loop.by_cost()) entry["planned"] = device.share;
    if (device.lent_part > 0.0) entry["lent_part"] = device.lent_part;
  }
  return metrics;
}

py::object items_dict(StepLoop& step_loop) {
  step_loop.settle();
  const std::optional<ItemReport> report = step_loop.item_report();
  if (!report) return py::none();
  const ItemPadding& padding = report->padding;
  py::dict result("steps"_a = report->steps, "cost"_a = padding.own, "padded_cost"_a = padding.padded,
                  "contiguous_cost"_a = padding.contiguous, "padding_saved"_a = padding.saved());
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

py::list events_list(const observe::EventRing& ring, const PerDevice<observe::DeviceMetrics>& devices) {
  py::list events;
  for (const observe::TraceEvent& event : ring.snapshot()) {
    std::optional<std::string> device;
    if (event.device) device = devices[*event.device].name;
    events.append(py::dict("kind"_a = observe::name_of(event.kind), "device"_a = device, "step"_a = event.step,
                           "begin"_a = event.begin, "end"_a = event.end, "start_seconds"_a = event.start_seconds,
                           "duration_seconds"_a = event.duration_seconds));
  }
  return events;
}

py::list events_list(StepLoop& step_loop) {
  step_loop.settle();
  return events_list(step_loop.events(), {step_loop.group().ids(), step_loop.metrics().devices});
}

py::list history_list(StepLoop& step_loop) {
  step_loop.settle();
  return history_list(step_loop.history(), step_loop.metrics().devices);
}

py::list history_list(const observe::History& history, const std::vector<observe::DeviceMetrics>& devices) {
  py::list rows;
  for (const observe::HistoryRow& row : history.snapshot()) {
    py::dict blocks;
    py::dict items;
    py::dict busy_seconds;
    py::dict costs;
    py::dict planned;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      const py::str name(devices[d].name);
      if (!row.costs.empty()) costs[name] = row.costs[d];
      if (!row.planned.empty()) planned[name] = row.planned[d];
      if (!row.blocks.empty()) blocks[name] = row.blocks[d];
      items[name] = row.items[d];
      busy_seconds[name] = row.busy_seconds[d];
    }
    py::dict figures("first_step"_a = row.first_step, "steps"_a = row.steps, "items"_a = items,
                     "busy_seconds"_a = busy_seconds,
                     "costs"_a = row.costs.empty() ? py::object(py::none()) : py::object(costs),
                     "planned"_a = row.planned.empty() ? py::object(py::none()) : py::object(planned),
                     "step_seconds"_a = row.step_seconds, "longest_step_seconds"_a = row.longest_step_seconds,
                     "moves"_a = row.moves, "reduction_seconds"_a = row.reduction_seconds,
                     "launching_seconds"_a = row.launching_seconds, "reason"_a = row.reason);
    if (!row.blocks.empty()) figures["blocks"] = blocks;
    rows.append(figures);
  }
  return rows;
}

py::dict memory_dict(const StepLoop& step_loop) {
  py::dict devices;
  for (const MemoryReport& report : step_loop.memory_report()) {
    py::dict entry("limit_bytes"_a = report.limit_bytes);
    if (report.items) {
      entry["fixed_bytes"] = report.items->fixed_bytes;
      entry["bytes_per_item"] = report.items->bytes_per_item;
      if (report.items->largest_micro_batch) entry["largest_micro_batch"] = *report.items->largest_micro_batch;
    }
    if (report.costs) {
      entry["fixed_bytes_with_costs"] = report.costs->fixed_bytes;
      entry["bytes_per_cost"] = report.costs->bytes_per_cost;
      if (report.costs->largest_padded_cost) entry["largest_padded_cost"] = *report.costs->largest_padded_cost;
    }
    devices[py::str(report.device)] = entry;
  }
  return devices;
}

}  // namespace paceline::python

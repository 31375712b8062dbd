// SPDX-License-Identifier: Apache-2.0
#include "step_loop_reports.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "move_reports.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

const char* measure_name(plan::ItemMeasure measure) {
  if (measure == plan::ItemMeasure::padded) return "padded";
  return measure == plan::ItemMeasure::sum ? "sum" : "count";
}

}  // namespace

py::dict metrics_dict(StepLoop& step_loop) {
  step_loop.settle();
  const observe::Metrics metrics = step_loop.metrics();
  const bool any_costs = step_loop.item_report().has_value();
  double most_items = 0.0;
  double most_cost = 0.0;
  for (const observe::DeviceMetrics& device : metrics.devices) {
    most_items = std::max(most_items, device.items_per_second);
    most_cost = std::max(most_cost, device.cost_per_second);
  }
  py::dict devices;
  for (const observe::DeviceMetrics& device : metrics.devices) {
    py::dict entry;
    entry["share"] = device.last_items;
    entry["items"] = device.items;
    entry["busy_seconds"] = device.busy_seconds;
    entry["idle_seconds"] = device.idle_seconds;
    entry["items_per_second"] = device.items_per_second;
    entry["speed"] = most_cost > 0.0    ? device.cost_per_second / most_cost
                     : most_items > 0.0 ? device.items_per_second / most_items
                                        : 0.0;
    if (any_costs) {
      entry["cost"] = device.cost;
      entry["cost_per_second"] = device.cost_per_second;
    }
    devices[py::str(device.name)] = entry;
  }
  py::dict result;
  result["devices"] = devices;
  result["steps"] = metrics.steps;
  result["moves"] = metrics.moves;
  const balance::BalanceReport decided = step_loop.balancer().report();
  result["taken_back"] = decided.taken_back;
  result["recent_moves"] = move_dicts(decided.recent_moves);
  result["imbalance"] = metrics.imbalance;
  result["compute_seconds"] = metrics.compute_seconds;
  result["step_seconds"] = metrics.step_seconds;
  return result;
}

py::object items_dict(StepLoop& step_loop) {
  step_loop.settle();
  const std::optional<ItemReport> report = step_loop.item_report();
  if (!report) return py::none();
  py::dict result;
  result["steps"] = report->steps;
  result["cost"] = report->padding.own;
  result["padded_cost"] = report->padding.padded;
  result["contiguous_cost"] = report->padding.contiguous;
  result["padding_saved"] = report->padding.saved();
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

py::list events_list(StepLoop& step_loop) {
  step_loop.settle();
  py::list events;
  for (const observe::TraceEvent& event : step_loop.events().snapshot()) {
    py::dict entry;
    entry["kind"] = observe::name_of(event.kind);
    entry["device"] = event.device ? py::object(py::str(step_loop.group().devices()[*event.device].name)) : py::none();
    entry["step"] = event.step;
    entry["begin"] = event.begin;
    entry["end"] = event.end;
    entry["start_seconds"] = event.start_seconds;
    entry["duration_seconds"] = event.duration_seconds;
    events.append(entry);
  }
  return events;
}

py::list history_list(StepLoop& step_loop) {
  step_loop.settle();
  const std::vector<Device>& devices = step_loop.group().devices();
  py::list rows;
  for (const observe::HistoryRow& row : step_loop.history().snapshot()) {
    py::dict items;
    py::dict busy_seconds;
    py::dict costs;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      const py::str name(devices[d].name);
      if (!row.costs.empty()) costs[name] = row.costs[d];
      items[name] = row.items[d];
      busy_seconds[name] = row.busy_seconds[d];
    }
    py::dict entry;
    entry["first_step"] = row.first_step;
    entry["steps"] = row.steps;
    entry["items"] = items;
    entry["busy_seconds"] = busy_seconds;
    entry["costs"] = row.costs.empty() ? py::object(py::none()) : py::object(costs);
    entry["step_seconds"] = row.step_seconds;
    entry["longest_step_seconds"] = row.longest_step_seconds;
    entry["moves"] = row.moves;
    rows.append(entry);
  }
  return rows;
}

py::dict memory_dict(const StepLoop& step_loop) {
  py::dict devices;
  for (const MemoryReport& report : step_loop.memory_report()) {
    py::dict entry;
    entry["limit_bytes"] = report.limit_bytes;
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

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include <paceline/balance/report.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/per_device.hpp>

namespace paceline::python {

// The reports of a StepLoop as Python objects. The first four functions wait until the times of all committed steps are
// known.
pybind11::dict metrics_dict(StepLoop& step_loop);
/// None before the first plan with costs.
pybind11::object items_dict(StepLoop& step_loop);
pybind11::list events_list(StepLoop& step_loop);
pybind11::list history_list(StepLoop& step_loop);
// The same of any trainer. `devices`: those of the snapshot, for their names.
pybind11::dict metrics_dict(const observe::Metrics& metrics, bool any_costs);
pybind11::list events_list(const observe::EventRing& events, const PerDevice<observe::DeviceMetrics>& devices);
pybind11::list history_list(const observe::History& history, const std::vector<observe::DeviceMetrics>& devices);
/// By the name of the device. Devices without a limit are left out.
pybind11::dict memory_dict(const StepLoop& step_loop);

/// Models of pairs (fixed seconds, seconds per item).
std::vector<std::optional<plan::CostModel>> hints_of(
    const std::vector<std::optional<std::pair<double, double>>>& pairs);

/// The outcome of each change of shares.
pybind11::list move_dicts(const std::vector<balance::MoveReport>& moves);

}  // namespace paceline::python

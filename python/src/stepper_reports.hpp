// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <paceline/engine/stepper.hpp>

namespace paceline::python {

// What a stepper knows, as Python has it. The first four wait until the times of all committed steps are known.
pybind11::dict metrics_dict(Stepper& stepper);
/// None before the first plan with costs.
pybind11::object items_dict(Stepper& stepper);
pybind11::list events_list(Stepper& stepper);
pybind11::list history_list(Stepper& stepper);
/// By the name of the device; those without a limit are left out.
pybind11::dict memory_dict(const Stepper& stepper);

}  // namespace paceline::python

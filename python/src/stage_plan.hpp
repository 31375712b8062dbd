// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <paceline/plan/stages.hpp>

namespace paceline::python {

/// A plan of stages as Python sees it.
pybind11::dict dict_of(const plan::StagePlan& plan);
/// What ranks layouts; called by bind_stage_balancer.
void bind_layouts(pybind11::module_& module);

}  // namespace paceline::python

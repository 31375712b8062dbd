// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include <paceline/balance/report.hpp>

namespace paceline::python {

/// What became of changes of shares, as Python has it: one dictionary each.
pybind11::list move_dicts(const std::vector<balance::MoveReport>& moves);

}  // namespace paceline::python

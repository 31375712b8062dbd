// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include <paceline/balance/report.hpp>

namespace paceline::python {

/// The outcome of each change of shares, as a dictionary.
pybind11::list move_dicts(const std::vector<balance::MoveReport>& moves);

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace paceline::python {

/// A type of context managers that do nothing, which a step enters a dozen times. Those of contextlib take two calls of
/// Python each, and a method of pybind11 takes as long.
pybind11::object nothing_type();

}  // namespace paceline::python

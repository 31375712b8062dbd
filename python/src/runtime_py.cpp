// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"

namespace paceline::python {

void bind_runtime(pybind11::module_&) {}

}  // namespace paceline::python

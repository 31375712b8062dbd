// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <paceline/comm/gpu_links.hpp>

namespace paceline::python {

/// A dictionary for each pair of GPUs.
pybind11::list list_of(const paceline::GpuLinks& links);

}  // namespace paceline::python

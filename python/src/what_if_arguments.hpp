// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/balancer.hpp>

namespace paceline::python {

// These accept any object and show the wanted type as annotation. pybind11's own message for a wrong type lists
// signatures.
using WhatIfSpeeds = pybind11::typing::Optional<std::map<std::string, double>>;               // name -> factor
using WhatIfAdded = pybind11::typing::Optional<std::vector<std::pair<std::string, double>>>;  // (like, factor)
using WhatIfRemoved = pybind11::typing::Optional<std::vector<std::string>>;
using WhatIfBatchSize = pybind11::typing::Optional<std::int64_t>;

/// Converts the arguments of a what-if question, replacing names by indices. None means unchanged.
/// @throws InvalidArgument for a wrong type, and for a name that no device has, listing the names that exist.
balance::WhatIfOptions what_if_options(const balance::Balancer& balancer, const WhatIfSpeeds& speeds,
                                       const WhatIfAdded& add, const WhatIfRemoved& remove,
                                       const WhatIfBatchSize& batch_size);

}  // namespace paceline::python

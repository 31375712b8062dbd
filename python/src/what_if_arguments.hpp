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

// Any object, with the type that it should have as its annotation: what pybind11 says of a wrong one lists signatures.
using WhatIfSpeeds = pybind11::typing::Optional<std::map<std::string, double>>;               // name -> factor
using WhatIfAdded = pybind11::typing::Optional<std::vector<std::pair<std::string, double>>>;  // (like, factor)
using WhatIfRemoved = pybind11::typing::Optional<std::vector<std::string>>;
using WhatIfBatchSize = pybind11::typing::Optional<std::int64_t>;

/// What Python asked a balancer, with names as indices. None, of any of them: as it is now.
/// @throws InvalidArgument for what has another type, and for a name that no device has, saying which there are.
balance::WhatIfOptions what_if_options(const balance::Balancer& balancer, const WhatIfSpeeds& speeds,
                                       const WhatIfAdded& add, const WhatIfRemoved& remove,
                                       const WhatIfBatchSize& batch_size);

}  // namespace paceline::python

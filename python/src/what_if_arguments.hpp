// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/balancer.hpp>

namespace paceline::python {

using WhatIfDevices = std::map<std::string, double>;              // name -> factor
using WhatIfAdded = std::vector<std::pair<std::string, double>>;  // (like, factor)

/// Names to indices, for all that ask a balancer from Python.
/// @throws InvalidArgument for a name that no device has, saying which there are.
balance::WhatIfOptions what_if_options(const balance::Balancer& balancer, const WhatIfDevices& speeds,
                                       const WhatIfAdded& add, const std::vector<std::string>& remove,
                                       std::int64_t batch_size);

}  // namespace paceline::python

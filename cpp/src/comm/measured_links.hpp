// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <span>

#include <paceline/comm/gpu_links.hpp>

#include "comm/link.hpp"

namespace paceline::internal {

/// The links between the endpoints, measured now, within `budget`. Then the GPUs have `patience` to give memory back.
[[nodiscard]] GpuLinks measure_links(std::span<const Endpoint> endpoints, std::chrono::nanoseconds budget,
                                     std::chrono::nanoseconds patience = std::chrono::milliseconds(100));

/// The same. Endpoints of the same names are measured once in a process, if all of it succeeds. Any thread.
[[nodiscard]] GpuLinks known_links(std::span<const Endpoint> endpoints,
                                   std::chrono::nanoseconds budget = std::chrono::seconds(1));

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paceline {

/// The number of orders in which the fake of the CUDA runtime runs a scenario. Sanitizers get fewer: they check memory
/// and host threads, and make each order five to ten times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr std::uint64_t kOrders = 30;
#else
inline constexpr std::uint64_t kOrders = 200;
#endif

}  // namespace paceline

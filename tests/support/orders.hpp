// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paceline {

/// In how many orders the fake of the CUDA runtime runs a scenario. The plain build looks at the order; sanitizers look
/// at memory and at the host's threads, and make each order take five to ten times as long.
#if defined(__SANITIZE_THREAD__)
inline constexpr std::uint64_t kOrders = 100;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr std::uint64_t kOrders = 200;
#else
inline constexpr std::uint64_t kOrders = 1000;
#endif

}  // namespace paceline

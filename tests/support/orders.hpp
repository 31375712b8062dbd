// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paceline {

/// In how many orders the fake of the CUDA runtime runs a scenario. Fewer under the thread sanitizer, which looks at
/// the host's threads and not at the order, and makes each take ten times as long.
#ifdef __SANITIZE_THREAD__
inline constexpr std::uint64_t kOrders = 100;
#else
inline constexpr std::uint64_t kOrders = 1000;
#endif

}  // namespace paceline

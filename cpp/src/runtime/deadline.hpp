// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace paceline::internal {

/// The timeout, limited to a year. The library's "for ever" is nanoseconds::max(). Adding to it, as
/// condition_variable::wait_for does, would overflow.
[[nodiscard]] inline std::chrono::nanoseconds bounded(std::chrono::nanoseconds timeout) {
  return std::min<std::chrono::nanoseconds>(timeout, std::chrono::years(1));
}

}  // namespace paceline::internal

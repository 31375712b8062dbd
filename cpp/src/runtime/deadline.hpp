// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace paceline::internal {

/// The timeout, at most a year. The library's "for ever" is nanoseconds::max(): twice that, or that from now on
/// (condition_variable::wait_for adds them, too), would overflow.
[[nodiscard]] inline std::chrono::nanoseconds bounded(std::chrono::nanoseconds timeout) {
  return std::min<std::chrono::nanoseconds>(timeout, std::chrono::years(1));
}

}  // namespace paceline::internal

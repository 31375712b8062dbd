// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace paceline::plan {

/// The last n in [low, high) for which `fits(n)` holds. Requires that it holds at `low`, not at `high`, and changes
/// once. Neither of the two is asked.
template <class Integer, class Fits>
Integer last_that_fits(Integer low, Integer high, const Fits& fits) {
  while (low + 1 < high) {
    const Integer middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

/// The same with a guess.
///
/// `guess` comes from a formula in floating point. It is nearly always exact or one off, so its neighbours are looked
/// at first. If rounding makes long runs of equal values, the search widens by doubling and stays O(log).
template <class Fits>
std::int64_t last_that_fits(std::int64_t low, std::int64_t high, std::int64_t guess, const Fits& fits) {
  guess = std::clamp(guess, low, high - 1);
  const bool upwards = fits(guess);
  (upwards ? low : high) = guess;
  for (std::int64_t step = 1; high - low > 1; step *= 2) {
    const std::int64_t distance = std::min(step, high - low - 1);
    const std::int64_t probe = upwards ? low + distance : high - distance;
    const bool fit = fits(probe);
    (fit ? low : high) = probe;
    if (fit != upwards) break;
  }
  return last_that_fits(low, high, fits);
}

/// A double as a count of items, saturating at `limit`; NaN and negatives give 0.
inline std::int64_t to_count(double value, std::int64_t limit) {
  if (!(value > 0.0)) return 0;
  return value < static_cast<double>(limit) ? static_cast<std::int64_t>(value) : limit;
}

}  // namespace paceline::plan

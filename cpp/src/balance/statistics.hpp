// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace paceline::balance {

/// The median of `values`, the mean of the two middle ones when their number is even; 0 for none. Reorders `values`.
[[nodiscard]] double median(std::vector<double>& values);

/// The standard error of a median of `samples` values with standard deviation `deviation`.
///
/// 1.2533 = sqrt(pi / 2) for normal values; up to two samples the median is the mean.
[[nodiscard]] double median_error(double deviation, std::size_t samples);

/// Standard deviation of a normal distribution whose absolute deviations have the median `median_deviation`.
[[nodiscard]] double from_median_deviation(double median_deviation);

/// z with P(Z <= z) = `probability` for a standard normal Z, to 4.5e-4 (Abramowitz & Stegun, 26.2.23).
[[nodiscard]] double normal_quantile(double probability);

}  // namespace paceline::balance

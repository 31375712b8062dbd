// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace paceline::plan {

/// The median of `values`, the mean of the two middle ones when their number is even; 0 for none.
[[nodiscard]] double median(std::vector<double> values);
/// The same without a copy; puts the values into another order.
[[nodiscard]] double median_in_place(std::span<double> values);

/// The standard error of a median of `samples` values with standard deviation `deviation`.
///
/// `variance_factor`: the variance of their mean over that of as many independent ones. Of independent normal values a
/// median has pi / 2 times the variance of the mean; up to two samples it is the mean. Correlations r add 4 asin(r) per
/// pair to it where they add 2 pi r / (pi / 2) to the mean, about as much, so the median bears correlation better.
[[nodiscard]] double median_error(double deviation, std::size_t samples, double variance_factor = 1.0);

/// Standard deviation of a normal distribution whose absolute deviations have the median `median_deviation`.
[[nodiscard]] double from_median_deviation(double median_deviation);

/// z with P(Z <= z) = `probability` for a standard normal Z, to 4.5e-4 (Abramowitz & Stegun, 26.2.23).
[[nodiscard]] double normal_quantile(double probability);

}  // namespace paceline::plan

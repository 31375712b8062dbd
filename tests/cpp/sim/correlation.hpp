// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace paceline::sim {

/// The mean product of a series' deviations from its mean with those `lag` steps later. Lag 0 gives the variance.
inline double covariance(const std::vector<double>& series, std::size_t lag) {
  const auto count = static_cast<double>(series.size());
  double mean = 0.0;
  for (const double value : series) mean += value / count;
  double sum = 0.0;
  for (std::size_t k = 0; k + lag < series.size(); ++k) sum += (series[k] - mean) * (series[k + lag] - mean);
  return sum / count;
}

inline double correlation(const std::vector<double>& series, std::size_t lag) {
  return covariance(series, lag) / covariance(series, 0);
}

}  // namespace paceline::sim

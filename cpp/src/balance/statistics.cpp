// SPDX-License-Identifier: Apache-2.0
#include "balance/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

namespace paceline::balance {
double median(std::vector<double> values) { return median_in_place(values); }

double median_in_place(std::span<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

double median_error(double deviation, std::size_t samples, double variance_factor) {
  if (samples == 0) return deviation;
  const double independent = samples <= 2 ? 1.0 : 0.5 * std::numbers::pi;
  return deviation * std::sqrt((independent + variance_factor - 1.0) / static_cast<double>(samples));
}

double from_median_deviation(double median_deviation) { return 1.4826 * median_deviation; }

double normal_quantile(double probability) {
  if (probability > 0.5) return -normal_quantile(1.0 - probability);
  const double t = std::sqrt(-2.0 * std::log(std::max(probability, 1e-12)));
  const double above = 2.515517 + t * (0.802853 + t * 0.010328);
  const double below = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
  return above / below - t;
}

}  // namespace paceline::balance

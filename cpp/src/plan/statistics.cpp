// SPDX-License-Identifier: Apache-2.0
#include "plan/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

namespace paceline::plan {
namespace {

/// Like std::nth_element: quickselect (Hoare's FIND), with a partition that has no branch on the values. On noise each
/// such branch is mispredicted half of the time, and a decision spends most of its time on medians. This takes a third
/// of the time.
void select(std::span<double> values, std::size_t nth) {
  std::size_t begin = 0;
  std::size_t end = values.size();
  while (end - begin > 1) {
    const std::size_t last = end - 1;
    const double low = std::min(values[begin], values[last]);
    const double high = std::max(values[begin], values[last]);
    const double middle = values[begin + (end - begin) / 2];
    const double pivot = std::clamp(middle, low, high);  // the median of three
    std::size_t below = begin;
    for (std::size_t i = begin; i < end; ++i) {
      const double value = values[i];
      values[i] = values[below];
      values[below] = value;
      below += static_cast<std::size_t>(value < pivot);
    }
    if (nth < below) {
      end = below;
      continue;
    }
    // From here on all are at least the pivot; those equal to it come first.
    std::size_t equal = below;
    for (std::size_t i = below; i < end; ++i) {
      const double value = values[i];
      values[i] = values[equal];
      values[equal] = value;
      equal += static_cast<std::size_t>(value == pivot);
    }
    if (nth < equal || equal == begin) return;  // the latter for NaN, which has no order
    begin = equal;
  }
}

}  // namespace

double median(std::vector<double> values) { return median_in_place(values); }

double median_in_place(std::span<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  select(values, values.size() / 2);
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

}  // namespace paceline::plan

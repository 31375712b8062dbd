// SPDX-License-Identifier: Apache-2.0
#include "balance/statistics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include <paceline/sim/random.hpp>

namespace paceline::balance {
namespace {

double median_by_sorting(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

TEST(Median, IsTheMiddleOfTheSortedValues) {
  sim::Random random(1, 0, 0);
  for (std::size_t size = 1; size <= 200; ++size) {
    // From nearly all equal to nearly all different values.
    for (const double kinds : {1.0, 2.0, 5.0, 1000.0}) {
      std::vector<double> values(size);
      for (double& value : values) value = std::floor(kinds * random.uniform());
      const double expected = median_by_sorting(values);
      ASSERT_EQ(median(values), expected) << size << " values of " << kinds << " kinds";
    }
  }
}

TEST(Median, OfNothingIsZero) { EXPECT_EQ(median({}), 0.0); }

}  // namespace
}  // namespace paceline::balance

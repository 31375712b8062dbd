// SPDX-License-Identifier: Apache-2.0
#include "balance/reduction_cost.hpp"

#include <gtest/gtest.h>

namespace paceline::balance {
namespace {

using Seconds = std::vector<double>;

TEST(ReductionCost, LiesOnALineFromOneDeviceThatHasNothingToReduce) {
  ReductionCost cost({}, 4);
  for (int k = 0; k < 2; ++k) cost.record(3, 0.004, 0.1);
  EXPECT_EQ(cost.seconds(), (Seconds{0.0, 0.0, 0.002, 0.004, 0.006}));
}

TEST(ReductionCost, TakesTheMedianOfWhatWasMeasured) {
  ReductionCost cost({0.0, 0.0, 1.0, 2.0}, 3);
  for (const double seconds : {0.5, 0.004, 0.003, 0.004, 0.005}) cost.record(2, seconds, 0.1);
  EXPECT_EQ(cost.seconds(), (Seconds{0.0, 0.0, 0.004, 2.0})) << "what is given counts where nothing was measured";
}

}  // namespace
}  // namespace paceline::balance

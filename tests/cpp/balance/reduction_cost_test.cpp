// SPDX-License-Identifier: Apache-2.0
#include "balance/reduction_cost.hpp"

#include <gtest/gtest.h>

namespace paceline::balance {
namespace {

using Seconds = std::vector<double>;

TEST(ReductionCost, IsFreeUntilToldOrMeasured) {
  EXPECT_TRUE(ReductionCost({}, 3).seconds().empty());
  EXPECT_EQ(ReductionCost({0.0, 0.0, 1.0, 2.0}, 3).seconds(), (Seconds{0.0, 0.0, 1.0, 2.0}));
}

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

TEST(ReductionCost, DoesNotBelieveOneStepAlone) {
  ReductionCost cost({}, 2);
  cost.record(2, 0.5, 0.1);
  EXPECT_TRUE(cost.seconds().empty());
}

TEST(ReductionCost, ForgetsWhatIsNotWorthASplit) {
  ReductionCost cost({}, 2);
  for (int k = 0; k < 3; ++k) cost.record(2, 0.0001, 0.1);
  EXPECT_TRUE(cost.seconds().empty());
}

TEST(ReductionCost, FollowsAChange) {
  ReductionCost cost({}, 2);
  for (int k = 0; k < 40; ++k) cost.record(2, 0.004, 0.1);
  for (int k = 0; k < 16; ++k) cost.record(2, 0.008, 0.1);
  EXPECT_DOUBLE_EQ(cost.seconds()[2], 0.008);
}

}  // namespace
}  // namespace paceline::balance

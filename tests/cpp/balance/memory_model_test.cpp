// SPDX-License-Identifier: Apache-2.0
#include "balance/memory_model.hpp"

#include <gtest/gtest.h>

namespace paceline::balance {
namespace {

TEST(MemoryModel, StandsOnItsSmallestAndLargestSize) {
  MemoryModel model;
  EXPECT_FALSE(model.most(100));
  EXPECT_FALSE(model.largest());
  model.add(4, 50);
  EXPECT_EQ(model.sizes(), 1);
  EXPECT_EQ(model.fixed_bytes(), 0.0);
  EXPECT_EQ(model.most(100), 8.0);
  model.add(8, 70);
  EXPECT_EQ(model.sizes(), 2);
  EXPECT_EQ(model.fixed_bytes(), 30.0);
  EXPECT_EQ(model.bytes_per_size(), 5.0);
  EXPECT_EQ(model.most(100), 14.0);
  EXPECT_EQ(model.most(1), 0.0);
  model.add(8, 90);  // of one size the larger measurement counts
  model.add(6, 1);
  EXPECT_EQ(model.largest(), 8.0);
  EXPECT_EQ(model.fixed_bytes() + 8 * model.bytes_per_size(), 90.0);
  model.add(2, 90);  // no growth at all: everything fits
  EXPECT_FALSE(model.most(1000));
}

TEST(MemoryModel, WantsTwoSizesUnlessNothingIsEverSeen) {
  MemoryModel model;
  EXPECT_TRUE(model.wants_more());
  model.add(4, 50);
  model.add(4, 40);
  EXPECT_TRUE(model.wants_more());
  model.add(8, 60);
  EXPECT_FALSE(model.wants_more());
  MemoryModel silent;
  for (int k = 0; k < 3; ++k) {
    EXPECT_TRUE(silent.wants_more());
    silent.add(4 + k, 0);
  }
  EXPECT_FALSE(silent.wants_more());
}

}  // namespace
}  // namespace paceline::balance

// SPDX-License-Identifier: Apache-2.0
#include "balance/clusters.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

#include <paceline/sim/random.hpp>

namespace paceline::balance {
namespace {

ShapeEstimator known_shape() {
  ShapeEstimator shape(1);
  shape.set_reference(64.0);
  for (int k = 0; k < 10; ++k) {
    shape.add(0, k, 64, 10.4e-3);
    shape.add(0, k, 16, 5.6e-3);
  }
  shape.fit(0.01);
  return shape;
}

bool equal(const Cluster& a, const Cluster& b, const ShapeEstimator& shape) {
  const double unknown = shape.ratio_error(a.centre_items, b.centre_items);
  const double error = std::hypot(a.error * std::sqrt(static_cast<double>(a.members.size())),
                                  b.error * std::sqrt(static_cast<double>(b.members.size())), unknown);
  return std::abs(a.log_scale - b.log_scale) < std::max(0.01, 3.0 * error);
}

TEST(ClusterEquals, PartitionsAndLeavesNoTwoGroupsThatAreEqual) {
  const ShapeEstimator shape = known_shape();
  std::size_t groups = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    sim::Random random(seed, 0, 0);
    std::vector<Measured> devices(1 + random.next() % 24);
    for (std::size_t i = 0; i < devices.size(); ++i) {
      const double speed = 1.0 + 0.05 * static_cast<double>(random.next() % 4);
      devices[i] = {i, speed * std::exp(0.003 * random.normal()), 0.002 + 0.004 * random.uniform(),
                    48.0 + 32.0 * random.uniform()};
    }
    const std::vector<Cluster> clusters = cluster_equals(devices, shape);
    std::vector<std::size_t> members;
    for (std::size_t a = 0; a < clusters.size(); ++a) {
      members.insert(members.end(), clusters[a].members.begin(), clusters[a].members.end());
      for (std::size_t b = a + 1; b < clusters.size(); ++b)
        ASSERT_FALSE(equal(clusters[a], clusters[b], shape)) << "seed " << seed << ", groups " << a << " and " << b;
    }
    std::sort(members.begin(), members.end());
    ASSERT_EQ(members.size(), devices.size()) << "seed " << seed;
    for (std::size_t i = 0; i < members.size(); ++i) ASSERT_EQ(members[i], i) << "seed " << seed;
    groups += clusters.size();
  }
  EXPECT_GT(groups, 600U);  // otherwise no devices were separated
}

TEST(ClusterEquals, JoinsTheClosestFirst) {
  const ShapeEstimator shape = known_shape();
  // At these errors 1.00 and 1.02 count as equal, and so do 1.02 and 1.03, but not 1.00 and 1.03.
  const std::vector<Cluster> clusters =
      cluster_equals({{0, 1.0, 0.0055, 64.0}, {1, 1.02, 0.0055, 64.0}, {2, 1.03, 0.0055, 64.0}}, shape);
  ASSERT_EQ(clusters.size(), 2U);
  EXPECT_EQ(clusters[0].members, std::vector<std::size_t>{0});
  EXPECT_EQ(clusters[1].members, (std::vector<std::size_t>{1, 2}));
  EXPECT_NEAR(clusters[1].scale, std::sqrt(1.02 * 1.03), 1e-12);
  EXPECT_NEAR(clusters[1].error, 0.0055 / std::sqrt(2.0), 1e-12);
}

TEST(ClusterEquals, KeepsApartWhatWasToldApartUntilItIsWellWithinTheError) {
  const ShapeEstimator shape = known_shape();
  const auto groups = [&](double second, std::optional<std::size_t> a, std::optional<std::size_t> b) {
    return cluster_equals({{0, 1.0, 0.01, 64.0, a}, {1, second, 0.01, 64.0, b}}, shape).size();
  };
  const double between = std::exp(2.5 * 0.01 * std::sqrt(2.0));  // 2.5 standard errors
  EXPECT_EQ(groups(between, 0, 1), 2U);
  EXPECT_EQ(groups(between, 0, 0), 1U);
  EXPECT_EQ(groups(between, std::nullopt, std::nullopt), 1U);
  EXPECT_EQ(groups(between, 0, std::nullopt), 1U) << "its speed has changed since";
  EXPECT_EQ(groups(std::exp(1.5 * 0.01 * std::sqrt(2.0)), 0, 1), 1U);
}

TEST(ClusterEquals, TakesNoDeviceAndOne) {
  const ShapeEstimator shape = known_shape();
  EXPECT_TRUE(cluster_equals({}, shape).empty());
  const std::vector<Cluster> one = cluster_equals({{7, 2.5, 0.01, 64.0}}, shape);
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0].members, std::vector<std::size_t>{7});
  EXPECT_DOUBLE_EQ(one[0].scale, 2.5);
}

}  // namespace
}  // namespace paceline::balance

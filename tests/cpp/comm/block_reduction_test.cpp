// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include <paceline/error.hpp>

#include "comm/block_reduction.hpp"
#include "shortage.hpp"

namespace paceline::internal {
namespace {

TEST(BlockReduction, GivesTheSameBitsWhoeverDoesTheWork) {
  std::mt19937_64 rng(5);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(3, std::vector<float>(100'003));
  for (auto& input : inputs) {
    for (float& value : input) value = normal(rng);
  }
  const auto reduced = [&](std::size_t threads) {
    std::vector<float> output(inputs[0].size());
    ReductionSegment segment{.output = output.data(), .count = output.size(), .scale = 0.25};
    for (const auto& input : inputs) segment.inputs.push_back(input.data());
    BlockReduction reduction({segment});
    {
      std::vector<std::jthread> workers;
      for (std::size_t t = 0; t < threads; ++t) workers.emplace_back([&] { reduction.work(); });
    }
    EXPECT_TRUE(reduction.work()) << "everything is done once all have come back";
    return output;
  };
  const std::vector<float> alone = reduced(1);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    ASSERT_EQ(alone[i], ((inputs[0][i] + inputs[1][i]) + inputs[2][i]) * 0.25F);
  }
  EXPECT_EQ(alone, reduced(4));
}

TEST(BlockReduction, SumsManySmallSegmentsInPlace) {
  std::vector<std::vector<double>> first(500);
  std::vector<std::vector<double>> second(500);
  std::vector<ReductionSegment> segments;
  for (std::size_t s = 0; s < first.size(); ++s) {
    first[s].assign(s % 17, static_cast<double>(s));
    second[s].assign(s % 17, 1.0);
    segments.push_back({.inputs = {first[s].data(), second[s].data()},
                        .output = first[s].data(),
                        .count = first[s].size(),
                        .dtype = DType::float64});
  }
  BlockReduction reduction(segments);
  EXPECT_TRUE(reduction.work());
  for (std::size_t s = 0; s < first.size(); ++s) {
    for (const double value : first[s]) ASSERT_EQ(value, static_cast<double>(s) + 1.0);
  }
}

TEST(BlockReduction, RefusesToScaleWhatItCannotScale) {
  const float sums[] = {1.0F};
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::int32, DType::int64}) {
    const ReductionSegment segment{.inputs = {sums}, .count = 0, .dtype = dtype, .scale = 0.5};
    EXPECT_THROW(BlockReduction({segment}), InvalidArgument) << name_of(dtype);
  }
}

TEST(BlockReduction, NeedsNoMemoryForItsWork) {
  std::vector<double> sums(100'000, 1.0);
  std::vector<double> others(100'000, 2.0);
  BlockReduction reduction(std::vector<ReductionSegment>{{.inputs = {sums.data(), others.data()},
                                                          .output = sums.data(),
                                                          .count = sums.size(),
                                                          .dtype = DType::float64,
                                                          .scale = 0.5}});
  const bool done = [&] {
    const Shortage shortage;
    return reduction.work();
  }();
  EXPECT_TRUE(done);
  EXPECT_EQ(sums.back(), 1.5);
}

TEST(BlockReduction, LeavesAnOutputWithoutInputsAsItWas) {
  std::vector<float> output(10, 3.0F);
  BlockReduction reduction(
      std::vector<ReductionSegment>{{.output = output.data(), .count = output.size(), .scale = 0.5}});
  EXPECT_TRUE(reduction.work());
  EXPECT_EQ(output, std::vector<float>(10, 3.0F));
}

TEST(BlockReduction, IsDoneAtOnceWithNothingToSum) { EXPECT_TRUE(BlockReduction(std::vector<BlockJob>{}).work()); }

}  // namespace
}  // namespace paceline::internal

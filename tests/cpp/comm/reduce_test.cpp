// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/comm/reduce.hpp>
#include <paceline/error.hpp>

#include "comm/block_reduction.hpp"
#include "comm/reduce_kernels.hpp"
#include "reference.hpp"
#include "shortage.hpp"

namespace paceline::internal {
namespace {

using reference::bits_of;
using reference::kDTypes;
using reference::kOps;

std::string describe(const char* isa, DType dtype, ReduceOp op, std::size_t k, std::size_t count, std::size_t index) {
  return std::string(isa) + " " + name_of(dtype) + " " + name_of(op) + " k=" + std::to_string(k) +
         " count=" + std::to_string(count) + " at " + std::to_string(index);
}

void reduce_with(const internal::ReduceKernels& kernels, DType dtype, ReduceOp op,
                 const std::vector<const void*>& inputs, const std::vector<void*>& outputs, std::size_t count) {
  kernels.functions[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
      inputs.data(), inputs.size(), outputs.data(), outputs.size(), count);
}

// Compares one run of the kernels with the reference. The bytes around the output must not change.
void expect_reference(const internal::ReduceKernels& kernels, DType dtype, ReduceOp op, std::size_t k,
                      std::size_t count, std::size_t misalignment, std::mt19937_64& random) {
  const std::size_t bytes = count * size_of(dtype);
  std::vector<std::vector<char>> memory(k, std::vector<char>(bytes + 16));
  std::vector<const void*> inputs;
  for (std::size_t i = 0; i < k; ++i) {
    inputs.push_back(memory[i].data() + (misalignment + i) % 9);
    reference::fill(const_cast<void*>(inputs[i]), count, dtype, random);
  }
  std::vector<char> output(bytes + 32, '\x5a');
  char* const target = output.data() + 8 + misalignment;
  reduce_with(kernels, dtype, op, inputs, {target}, count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t expected = reference::reduced_bits(inputs, i, dtype, op);
    ASSERT_TRUE(reference::same(bits_of(target, i, dtype), expected, dtype))
        << describe(kernels.isa, dtype, op, k, count, i) << std::hex << ": " << bits_of(target, i, dtype)
        << ", expected " << expected;
  }
  for (const char* byte = output.data(); byte < output.data() + output.size(); ++byte) {
    if (byte < target || byte >= target + bytes) {
      ASSERT_EQ(*byte, '\x5a') << describe(kernels.isa, dtype, op, k, count, 0) << ": wrote beside the output";
    }
  }
}

TEST(ReduceBlock, AgreesWithThePlainReferenceForEveryTypeOperationCountAndAlignment) {
  std::mt19937_64 random(1);
  for (const auto* kernels : internal::supported_reduce_kernels()) {
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        for (const std::size_t k : {1, 2, 3, 5}) {
          for (const std::size_t count : {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 257}) {
            for (const std::size_t misalignment : {0, 1, 4}) {
              expect_reference(*kernels, dtype, op, k, count, misalignment, random);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(ReduceBlock, AgreesWithThePlainReferenceForManyInputs) {
  std::mt19937_64 random(2);
  for (const auto* kernels : internal::supported_reduce_kernels()) {
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        for (const std::size_t k : {16, 64, 65}) expect_reference(*kernels, dtype, op, k, 301, 2, random);
      }
    }
  }
}

TEST(ReduceBlock, KeepsEveryValueOfTheHalfTypes) {
  std::vector<std::uint16_t> every(65536);
  for (std::size_t i = 0; i < every.size(); ++i) every[i] = static_cast<std::uint16_t>(i);
  for (const auto* kernels : internal::supported_reduce_kernels()) {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
      std::vector<std::uint16_t> output(every.size());
      reduce_with(*kernels, dtype, ReduceOp::sum, {every.data()}, {output.data()}, every.size());
      for (std::size_t i = 0; i < every.size(); ++i) {
        ASSERT_TRUE(reference::same(output[i], every[i], dtype)) << kernels->isa << " " << name_of(dtype) << " " << i;
      }
    }
  }
}

TEST(ReduceBlock, RoundsHalfTypesOnceAtTheEnd) {
  // float16 cannot hold 2048 + 1, so rounding after each addition would lose all the ones.
  std::vector<std::uint16_t> values;
  for (const float number : {2048.0f, 1.0f, 1.0f, 1.0f}) values.push_back(reference::half_bits(number, 5, 10));
  std::vector<const void*> inputs;
  for (const auto& value : values) inputs.push_back(&value);
  std::uint16_t output = 0;
  reduce_block(inputs, &output, 1, DType::float16, ReduceOp::sum);
  EXPECT_EQ(reference::half_value(output, 5, 10), 2052.0f);  // 2051 lies between 2050 and 2052: ties to even
}

TEST(ReduceBlock, DoesNotOverflowInTheMiddleOfAHalfMean) {
  const std::uint16_t large = reference::half_bits(60000.0f, 5, 10);
  const std::vector<const void*> inputs(4, &large);
  std::uint16_t output = 0;
  reduce_block(inputs, &output, 1, DType::float16, ReduceOp::mean);
  EXPECT_EQ(output, large);
}

TEST(ReduceBlock, TruncatesIntegerMeansTowardsZeroAndWrapsSums) {
  const std::int32_t values[] = {-3, -4};
  std::int32_t mean = 0;
  reduce_block(std::vector<const void*>{&values[0], &values[1]}, &mean, 1, DType::int32, ReduceOp::mean);
  EXPECT_EQ(mean, -3);
  const std::int64_t largest = INT64_MAX;
  const std::int64_t one = 1;
  std::int64_t sum = 0;
  reduce_block(std::vector<const void*>{&largest, &one}, &sum, 1, DType::int64, ReduceOp::sum);
  EXPECT_EQ(sum, INT64_MIN);
}

// Reduces the first `k` of some buffers into those that are `written`.
void expect_written(const internal::ReduceKernels& kernels, DType dtype, ReduceOp op, std::size_t count,
                    std::size_t buffers, std::size_t k, const std::vector<std::size_t>& written,
                    std::mt19937_64& random) {
  std::vector<std::vector<char>> memory(buffers, std::vector<char>(count * size_of(dtype)));
  for (auto& buffer : memory) reference::fill(buffer.data(), count, dtype, random);
  std::vector<const void*> inputs;
  for (std::size_t b = 0; b < k; ++b) inputs.push_back(memory[b].data());
  std::vector<void*> outputs;
  for (const std::size_t b : written) outputs.push_back(memory[b].data());
  std::vector<std::uint64_t> expected;
  for (std::size_t i = 0; i < count; ++i) expected.push_back(reference::reduced_bits(inputs, i, dtype, op));
  reduce_with(kernels, dtype, op, inputs, outputs, count);
  for (const std::size_t b : written) {
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(reference::same(bits_of(memory[b].data(), i, dtype), expected[i], dtype))
          << describe(kernels.isa, dtype, op, k, count, i) << " in buffer " << b;
    }
  }
}

TEST(ReduceBlock, MayWriteOverAnyOfItsInputs) {
  std::mt19937_64 random(4);
  for (const auto* kernels : internal::supported_reduce_kernels()) {
    for (const DType dtype : kDTypes) {
      for (std::size_t over = 0; over < 5; ++over) {
        ASSERT_NO_FATAL_FAILURE(expect_written(*kernels, dtype, ReduceOp::sum, 77, 5, 5, {over}, random));
      }
    }
  }
}

TEST(ReduceBlock, WritesEveryOutputTheInputsAmongThem) {
  std::mt19937_64 random(7);
  constexpr std::size_t count = 203;  // whole rounds of the widest registers, single registers, and a rest
  for (const auto* kernels : internal::supported_reduce_kernels()) {
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        ASSERT_NO_FATAL_FAILURE(expect_written(*kernels, dtype, op, count, 4, 3, {0, 1, 2, 3}, random));
      }
    }
  }
}

TEST(ReduceBlock, OfNothingWritesNothing) {
  float output = 7.0f;
  reduce_block({}, &output, 1, DType::float32, ReduceOp::sum);
  const void* const input = &output;
  reduce_block({&input, 1}, nullptr, 0, DType::float32, ReduceOp::sum);
  EXPECT_EQ(output, 7.0f);
}

TEST(ReduceIsa, NamesTheBestSetThatThisProcessorRuns) {
  EXPECT_STREQ(reduce_isa(), internal::supported_reduce_kernels().front()->isa);
  EXPECT_STREQ(internal::supported_reduce_kernels().back()->isa, "baseline");
}

TEST(Names, AreKnownForEveryTypeAndOperationAndForNothingElse) {
  for (const DType dtype : kDTypes) EXPECT_STRNE(name_of(dtype), "unknown");
  for (const ReduceOp op : kOps) EXPECT_STRNE(name_of(op), "unknown");
  EXPECT_STREQ(name_of(static_cast<DType>(200)), "unknown");
  EXPECT_EQ(size_of(static_cast<DType>(200)), 0u);
  EXPECT_STREQ(name_of(static_cast<ReduceOp>(200)), "unknown");
}

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

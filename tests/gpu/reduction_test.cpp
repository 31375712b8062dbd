// SPDX-License-Identifier: Apache-2.0
//
// The reduction kernels against their host twins, to the bit: every type and operator, sizes around the 16 bytes of a
// load, every alignment.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/backend.hpp>

#include "../support/reduction_twin.hpp"
#include "support/boxes.hpp"

namespace paceline {
namespace {

constexpr std::size_t kMostInputs = 5;
constexpr std::size_t kMostOffset = 16;

class Reduction : public gpu_test::NeedsGpu {
 protected:
  void SetUp() override {
    NeedsGpu::SetUp();
    if (IsSkipped()) return;
    device_ = CudaBackend().open(find_device("cuda:0"));
    stream_ = device_->make_stream();
    done_ = device_->make_event(false);
  }

  struct Case {
    DType dtype;
    std::size_t inputs;
    std::size_t count;
    std::vector<std::size_t> offsets;  ///< bytes by which each input, and then the output, lies beside 16
    bool in_place;
    ReduceOp op = ReduceOp::sum;
    double scale = 1.0;
    std::size_t divisor = 0;
  };

  /// Of one of every kind: sums with and without a scale, means over the inputs and over more, minima, maxima.
  static Case any_of(Case c, std::mt19937_64& random) {
    c.in_place = random() % 2 == 0;
    c.op = reference::kOps[random() % std::size(reference::kOps)];
    if (random() % 2 == 0) c.scale = 0.37;
    if (random() % 2 == 0) c.divisor = c.inputs + 2;
    return c;
  }

  /// One buffer for each input and one for the output, each with room for every offset, the same here and there.
  void check(const Case& c, std::mt19937_64& random) {
    const std::size_t size = size_of(c.dtype);
    const std::size_t stride = (c.count * size + kMostOffset + 15) / 16 * 16;
    const std::size_t bytes = stride * (c.inputs + 1);
    const auto before = device_->allocate_pinned(bytes);
    const auto there = device_->allocate(bytes, *stream_);
    const auto after = device_->allocate_pinned(bytes);
    reference::fill(before->data(), bytes / size, c.dtype, random);
    std::vector<char> expected(bytes);
    std::memcpy(expected.data(), before->data(), bytes);

    const auto address = [&](void* base, std::size_t k) {
      return static_cast<char*>(base) + k * stride + c.offsets[k];
    };
    std::vector<const void*> inputs;
    cuda::ReductionArguments twin{};
    for (std::size_t k = 0; k < c.inputs; ++k) {
      inputs.push_back(address(there->data(), k));
      twin.inputs[k] = address(expected.data(), k);
    }
    const std::size_t output = c.in_place ? c.inputs / 2 : c.inputs;
    twin.input_count = static_cast<int>(c.inputs);
    twin.output = address(expected.data(), output);
    twin.count = c.count;
    twin.op = c.op;
    twin.scale = c.scale;
    twin.divisor = static_cast<std::int64_t>(c.divisor == 0 ? c.inputs : c.divisor);
    cuda::reduction_twin(twin, c.dtype);

    stream_->copy(there->data(), before->data(), bytes);
    stream_->reduce({inputs, address(there->data(), output), c.count, c.dtype, c.scale, c.op, c.divisor});
    stream_->copy(after->data(), there->data(), bytes);
    stream_->record(*done_);
    wait_for(*done_);
    const std::size_t begin = static_cast<std::size_t>(static_cast<char*>(twin.output) - expected.data());
    const auto* const result = static_cast<const char*>(after->data());
    for (std::size_t i = 0; i < c.count; ++i) {
      ASSERT_TRUE(reference::same(reference::bits_of(result + begin, i, c.dtype),
                                  reference::bits_of(twin.output, i, c.dtype), c.dtype))
          << name_of(c.op) << " of " << name_of(c.dtype) << ", " << c.inputs << " inputs of " << c.count << ", scale "
          << c.scale << ", divisor " << c.divisor << (c.in_place ? ", in place" : "") << ": element " << i;
    }
    // What lies around the output must be as it was.
    ASSERT_EQ(std::memcmp(result, expected.data(), begin), 0);
    const std::size_t end = begin + c.count * size;
    ASSERT_EQ(std::memcmp(result + end, expected.data() + end, bytes - end), 0);
  }

  std::unique_ptr<AsyncDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
};

TEST_F(Reduction, EqualsItsTwinForEveryTypeSizeAndAlignment) {
  std::mt19937_64 random(1);
  for (const DType dtype : reference::kDTypes) {
    for (const std::size_t count : {1, 2, 3, 7, 8, 9, 15, 16, 17, 255, 1003, 4099}) {
      // Every place of an element beside 16 bytes, and two that lie across the borders of elements.
      std::vector<std::size_t> offsets{1, kMostOffset - 1};
      for (std::size_t offset = 0; offset < kMostOffset; offset += size_of(dtype)) offsets.push_back(offset);
      for (const std::size_t offset : offsets) {
        for (std::size_t inputs = 1; inputs <= kMostInputs; ++inputs) {
          const std::vector<std::size_t> alike(inputs + 1, offset);
          ASSERT_NO_FATAL_FAILURE(check(any_of({dtype, inputs, count, alike, false}, random), random));
        }
      }
    }
  }
}

TEST_F(Reduction, EqualsItsTwinWhereTheBuffersAreAlignedDifferently) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    const DType dtype = reference::kDTypes[random() % std::size(reference::kDTypes)];
    const std::size_t inputs = 1 + random() % kMostInputs;
    const std::size_t unit = random() % 2 == 0 ? 1 : size_of(dtype);  // bytes, or whole elements
    std::vector<std::size_t> offsets(inputs + 1);
    for (std::size_t& offset : offsets) offset = random() % (kMostOffset / unit) * unit;
    ASSERT_NO_FATAL_FAILURE(check(any_of({dtype, inputs, 1 + random() % 3000, offsets, false}, random), random));
  }
}

TEST_F(Reduction, GoesRoundWhatIsLargerThanTheGrid) {
  std::mt19937_64 random(3);
  for (const DType dtype : reference::kDTypes) {
    const std::size_t count = (std::size_t{18} << 20) / size_of(dtype) + 5;  // 4096 blocks of 256 threads take 16 MiB
    const std::size_t offset = size_of(dtype);
    ASSERT_NO_FATAL_FAILURE(check({dtype, 2, count, {offset, offset, offset}, false}, random));
  }
}

TEST_F(Reduction, TakesAsManyInputsAsItSays) {
  constexpr auto most = static_cast<std::size_t>(cuda::kMaxReductionInputs);
  std::mt19937_64 random(4);
  const std::vector<std::size_t> aligned(most + 1, 0);
  ASSERT_NO_FATAL_FAILURE(check({DType::float32, most, 100, aligned, false}, random));
}

TEST_F(Reduction, ConversionsEqualTheirTwinsForEverySizeAndAlignment) {
  constexpr std::size_t kRoom = 65536;
  std::mt19937_64 random(5);
  const auto before = device_->allocate_pinned(kRoom);
  const auto after = device_->allocate_pinned(kRoom);
  const auto from = device_->allocate(kRoom, *stream_);
  const auto to = device_->allocate(kRoom, *stream_);
  for (const DType half : {DType::float16, DType::bfloat16}) {
    const int exponent_bits = half == DType::float16 ? 5 : 8;
    for (const bool narrows : {true, false}) {
      const DType source = narrows ? DType::float32 : half, target = narrows ? half : DType::float32;
      for (int round = 0; round < 100; ++round) {
        const std::size_t count = 1 + random() % 9000, skip = random() % 5;  // elements beside 16 bytes
        reference::fill(before->data(), count, source, random);
        void* const there = static_cast<char*>(from->data()) + skip * size_of(source);
        void* const result = static_cast<char*>(to->data()) + (round % 2) * size_of(target);
        stream_->copy(there, before->data(), count * size_of(source));
        stream_->convert(result, target, there, source, count);
        stream_->copy(after->data(), result, count * size_of(target));
        stream_->record(*done_);
        wait_for(*done_);
        std::vector<char> expected(count * size_of(target));
        cuda::conversion_twin({expected.data(), before->data(), count}, exponent_bits, 15 - exponent_bits, narrows);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_TRUE(reference::same(reference::bits_of(after->data(), i, target),
                                      reference::bits_of(expected.data(), i, target), target))
              << name_of(source) << " to " << name_of(target) << ", element " << i << " of " << count;
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline

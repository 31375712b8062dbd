// SPDX-License-Identifier: Apache-2.0
//
// The summing kernels against their host twins, to the bit: every type, sizes around the 16 bytes of a load, every
// alignment.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <paceline/runtime/async.hpp>
#include <paceline/runtime/backend.hpp>

#include "../support/sum_twin.hpp"
#include "support/boxes.hpp"

namespace paceline {
namespace {

constexpr std::size_t kMostInputs = 5;
constexpr std::size_t kMostOffset = 16;
constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};

class Sum : public gpu_test::NeedsGpu {
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
    std::vector<std::size_t> offsets;  ///< elements by which each input, and then the output, lies beside 16 bytes
    bool in_place;
    double scale;
  };

  /// One buffer for each input and one for the output, each with room for every offset, the same here and there.
  void check(const Case& c, std::mt19937_64& random) {
    const std::size_t size = size_of(c.dtype);
    const std::size_t stride = (c.count + kMostOffset) * size;
    const std::size_t bytes = stride * (c.inputs + 1);
    const auto before = device_->allocate_pinned(bytes);
    const auto there = device_->allocate(bytes, *stream_);
    const auto after = device_->allocate_pinned(bytes);
    reference::fill(before->data(), bytes / size, c.dtype, random);
    std::vector<char> expected(bytes);
    std::memcpy(expected.data(), before->data(), bytes);

    const auto address = [&](void* base, std::size_t k) {
      return static_cast<char*>(base) + k * stride + c.offsets[k] * size;
    };
    std::vector<const void*> inputs;
    cuda::SumArguments twin{};
    for (std::size_t k = 0; k < c.inputs; ++k) {
      inputs.push_back(address(there->data(), k));
      twin.inputs[k] = address(expected.data(), k);
    }
    const std::size_t output = c.in_place ? c.inputs / 2 : c.inputs;
    twin.input_count = static_cast<int>(c.inputs);
    twin.output = address(expected.data(), output);
    twin.count = c.count;
    twin.scale = c.scale;
    cuda::sum_twin(twin, c.dtype);

    stream_->copy(there->data(), before->data(), bytes);
    stream_->sum({inputs, address(there->data(), output), c.count, c.dtype, c.scale});
    stream_->copy(after->data(), there->data(), bytes);
    stream_->record(*done_);
    wait_for(*done_);
    for (std::size_t i = 0; i < bytes / size; ++i) {  // what lies around the output must be as it was
      ASSERT_TRUE(reference::same(reference::bits_of(after->data(), i, c.dtype),
                                  reference::bits_of(expected.data(), i, c.dtype), c.dtype))
          << name_of(c.dtype) << ", " << c.inputs << " inputs of " << c.count << ", scale " << c.scale
          << (c.in_place ? ", in place" : "") << ": element " << i << " of all buffers";
    }
  }

  std::unique_ptr<AsyncDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
};

TEST_F(Sum, EqualsItsTwinForEveryTypeSizeAndAlignment) {
  std::mt19937_64 random(1);
  for (const DType dtype : kDTypes) {
    for (const std::size_t count : {1, 2, 3, 7, 8, 9, 15, 16, 17, 255, 1003, 4099}) {
      for (std::size_t offset = 0; offset < kMostOffset / size_of(dtype); ++offset) {
        for (std::size_t inputs = 1; inputs <= kMostInputs; ++inputs) {
          const double scale = random() % 2 == 0 ? 1.0 : 1.0 / 3.0;
          const std::vector<std::size_t> alike(inputs + 1, offset);
          ASSERT_NO_FATAL_FAILURE(check({dtype, inputs, count, alike, random() % 2 == 0, scale}, random));
        }
      }
    }
  }
}

TEST_F(Sum, EqualsItsTwinWhereTheBuffersAreAlignedDifferently) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const DType dtype = kDTypes[random() % std::size(kDTypes)];
    const std::size_t inputs = 1 + random() % kMostInputs;
    std::vector<std::size_t> offsets(inputs + 1);
    for (std::size_t& offset : offsets) offset = random() % kMostOffset;
    const double scale = random() % 2 == 0 ? 1.0 : 0.37;
    ASSERT_NO_FATAL_FAILURE(check({dtype, inputs, 1 + random() % 3000, offsets, random() % 2 == 0, scale}, random));
  }
}

TEST_F(Sum, GoesRoundWhatIsLargerThanTheGrid) {
  std::mt19937_64 random(3);
  for (const DType dtype : kDTypes) {
    const std::size_t count = (std::size_t{18} << 20) / size_of(dtype) + 5;  // 4096 blocks of 256 threads take 16 MiB
    ASSERT_NO_FATAL_FAILURE(check({dtype, 2, count, {1, 1, 1}, false, 1.0}, random));
  }
}

TEST_F(Sum, TakesAsManyInputsAsItSays) {
  constexpr auto most = static_cast<std::size_t>(cuda::kMaxSumInputs);
  std::mt19937_64 random(4);
  ASSERT_NO_FATAL_FAILURE(
      check({DType::float32, most, 100, std::vector<std::size_t>(most + 1, 0), false, 1.0}, random));
}

}  // namespace
}  // namespace paceline

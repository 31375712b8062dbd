// SPDX-License-Identifier: Apache-2.0
//
// What only hardware shows of streams, events and memory: work that really runs after the call.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>

#include "pool.hpp"
#include "support/boxes.hpp"
#include "support/kernels.hpp"

namespace paceline {
namespace {

constexpr unsigned long long kDelayNanoseconds = 50'000'000;
constexpr std::size_t kBytes = std::size_t{4} << 20;

class OnDevice : public gpu_test::NeedsGpu {
 protected:
  void SetUp() override {
    NeedsGpu::SetUp();
    if (IsSkipped()) return;
    pool_ = cuda::Pool::of(0);
    device_ = CudaBackend().open(find_device("cuda:0"));
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  void TearDown() override {
    if (pool_ == nullptr) return;
    device_.reset();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(pool_->bytes_in_use(), 0U) << "memory that was not given back";
  }

  static void delay(const Stream& stream) {
    ASSERT_EQ(gpu_test::launch(&gpu_test::paceline_test_delay, stream.native(), 1, kDelayNanoseconds), cudaSuccess);
  }

  std::shared_ptr<cuda::Pool> pool_;
  std::unique_ptr<AsyncDevice> device_;
};

TEST_F(OnDevice, EventsAreDoneWhenTheDeviceHasComeToThem) {
  const auto stream = device_->make_stream();
  const auto begin = device_->make_event(true);
  const auto end = device_->make_event(true);
  stream->record(*begin);
  ASSERT_NO_FATAL_FAILURE(delay(*stream));
  stream->record(*end);
  EXPECT_FALSE(end->done());
  wait_for(*end);
  EXPECT_TRUE(end->done());
  EXPECT_GE(end->seconds_since(*begin), 0.9e-9 * kDelayNanoseconds);  // two clocks of the device
}

TEST_F(OnDevice, AWaitOrdersTwoStreams) {
  const auto first = device_->make_stream();
  const auto second = device_->make_stream();
  const auto written = device_->make_event(false);
  const auto read = device_->make_event(false);
  const auto there = device_->allocate(kBytes, *first);
  const auto pattern = device_->allocate_pinned(kBytes);
  const auto result = device_->allocate_pinned(kBytes);
  std::memset(pattern->data(), 0x5a, kBytes);
  std::memset(result->data(), 0, kBytes);
  first->zero(there->data(), kBytes);
  ASSERT_NO_FATAL_FAILURE(delay(*first));
  first->copy(there->data(), pattern->data(), kBytes);
  first->record(*written);
  second->wait(*written);
  second->copy(result->data(), there->data(), kBytes);
  second->record(*read);
  wait_for(*read);
  EXPECT_EQ(std::memcmp(result->data(), pattern->data(), kBytes), 0);
}

TEST_F(OnDevice, MemoryFreedOnAStreamIsNotGivenToAnotherBeforeItHasRun) {
  const auto first = device_->make_stream();
  const auto second = device_->make_stream();
  const auto done = device_->make_event(false);
  auto buffer = device_->allocate(kBytes, *first);
  const void* const address = buffer->data();
  ASSERT_NO_FATAL_FAILURE(delay(*first));
  buffer.reset();
  const auto other = device_->allocate(kBytes, *second);
  EXPECT_NE(other->data(), address);
  second->zero(other->data(), kBytes);
  second->record(*done);
  wait_for(*done);  // were the second stream made to wait for the first, the next line would find the delay over
  const auto behind = device_->make_event(false);
  first->record(*behind);
  EXPECT_FALSE(behind->done()) << "an allocation made one stream wait for another";
  wait_for(*behind);
}

TEST_F(OnDevice, LivesOnAfterAnAllocationThatIsTooLarge) {
  const auto stream = device_->make_stream();
  const auto done = device_->make_event(false);
  EXPECT_THROW(static_cast<void>(device_->allocate(std::size_t{1} << 44, *stream)), OutOfMemory);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  const auto buffer = device_->allocate(kBytes, *stream);
  stream->zero(buffer->data(), kBytes);
  stream->record(*done);
  wait_for(*done);
}

TEST_F(OnDevice, AThreadWithoutAContextHasNoneAfterwards) {
  using GetCurrent = CUresult (*)(CUcontext*);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, 4000, cudaEnableDefault, &found), cudaSuccess);
  std::thread([&] {
    CUcontext before = nullptr;
    CUcontext after = nullptr;
    ASSERT_EQ(reinterpret_cast<GetCurrent>(entry)(&before), CUDA_SUCCESS);
    const auto stream = device_->make_stream();
    const auto event = device_->make_event(false);
    const auto buffer = device_->allocate(kBytes, *stream);
    stream->record(*event);
    wait_for(*event);
    ASSERT_EQ(reinterpret_cast<GetCurrent>(entry)(&after), CUDA_SUCCESS);
    EXPECT_EQ(after, before);
  }).join();
}

TEST_F(OnDevice, TheCaptureOfAnotherThreadIsNotBroken) {
  cudaStream_t captured = nullptr;
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking), cudaSuccess);
  // Global: calls of any thread that are unsafe in a capture end it, unless that thread has said otherwise.
  ASSERT_EQ(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), cudaSuccess);
  std::thread([&] {
    const auto stream = device_->make_stream();
    const auto event = device_->make_event(true);
    const auto buffer = device_->allocate(kBytes, *stream);
    const auto pinned = device_->allocate_pinned(kBytes);
    stream->zero(buffer->data(), kBytes);
    stream->copy(pinned->data(), buffer->data(), kBytes);
    stream->record(*event);
    wait_for(*event);
  }).join();
  EXPECT_EQ(gpu_test::launch(&gpu_test::paceline_test_delay, captured, 1, 1000ULL), cudaSuccess);
  EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
  if (graph != nullptr) {
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  EXPECT_EQ(cudaStreamDestroy(captured), cudaSuccess);
}

}  // namespace
}  // namespace paceline

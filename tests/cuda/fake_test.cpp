// SPDX-License-Identifier: Apache-2.0
//
// The fake itself: does it notice what it is there for?
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "errors.hpp"
#include "fake_cuda.hpp"

// What nvcc's host code calls for each kernel.
extern "C" void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*,
                                       int*);

namespace fake {
namespace {

using paceline::says;

struct Pair {
  cudaStream_t writer = nullptr;
  cudaStream_t reader = nullptr;
  cudaEvent_t written = nullptr;
  cudaMemPool_t pool = nullptr;
  void* data = nullptr;
  void* copy = nullptr;
  void* host = nullptr;
};

constexpr std::size_t kBytes = 64;

Pair set_up(std::uint64_t seed) {
  Settings settings;
  settings.seed = seed;
  boot(settings);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  Pair pair;
  cudaMemPoolProps properties{};
  EXPECT_EQ(cudaMemPoolCreate(&pair.pool, &properties), cudaSuccess);
  EXPECT_EQ(cudaStreamCreateWithFlags(&pair.writer, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaStreamCreateWithFlags(&pair.reader, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaEventCreateWithFlags(&pair.written, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaMallocFromPoolAsync(&pair.data, kBytes, pair.pool, pair.writer), cudaSuccess);
  EXPECT_EQ(cudaMallocFromPoolAsync(&pair.copy, kBytes, pair.pool, pair.reader), cudaSuccess);
  EXPECT_EQ(cudaHostAlloc(&pair.host, kBytes, 0), cudaSuccess);
  return pair;
}

void write_and_read(const Pair& pair, bool wait) {
  EXPECT_EQ(cudaMemsetAsync(pair.data, 7, kBytes, pair.writer), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(pair.written, pair.writer), cudaSuccess);
  if (wait) {
    EXPECT_EQ(cudaStreamWaitEvent(pair.reader, pair.written, 0), cudaSuccess);
  }
  EXPECT_EQ(cudaMemcpyAsync(pair.host, pair.data, kBytes, cudaMemcpyDefault, pair.reader), cudaSuccess);
  while (cudaStreamQuery(pair.reader) == cudaErrorNotReady) {
  }
}

TEST(FakeCuda, RunsWhatIsOrderedRightForEverySeed) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    const Pair pair = set_up(seed);
    write_and_read(pair, true);
    ASSERT_TRUE(problems().empty()) << problems().front();
    ASSERT_EQ(*static_cast<unsigned char*>(pair.host), 7) << "seed " << seed;
  }
}

TEST(FakeCuda, NoticesAMissingWaitForEverySeedAndOftenComputesWrongly) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    const Pair pair = set_up(seed);
    write_and_read(pair, false);
    // Either the write has already been seen, or it comes later and meets the read.
    while (cudaStreamQuery(pair.writer) == cudaErrorNotReady) {
    }
    ASSERT_FALSE(problems().empty()) << "seed " << seed;
    wrong += static_cast<int>(*static_cast<unsigned char*>(pair.host) != 7);
  }
  EXPECT_GT(wrong, 100);
  EXPECT_LT(wrong, 1000);
}

TEST(FakeCuda, TakesWhatTheHostSawFinishedForAnOrder) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Pair pair = set_up(seed);
    EXPECT_EQ(cudaMemsetAsync(pair.data, 7, kBytes, pair.writer), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(pair.written, pair.writer), cudaSuccess);
    while (cudaEventQuery(pair.written) == cudaErrorNotReady) {
    }
    EXPECT_EQ(cudaMemcpyAsync(pair.host, pair.data, kBytes, cudaMemcpyDefault, pair.reader), cudaSuccess);
    while (cudaStreamQuery(pair.reader) == cudaErrorNotReady) {
    }
    ASSERT_TRUE(problems().empty()) << problems().front();
  }
}

TEST(FakeCuda, PoisonsFreshMemoryAndNoticesUseAfterRelease) {
  const Pair pair = set_up(3);
  EXPECT_EQ(static_cast<unsigned char*>(pair.data)[5], 0xFF);
  EXPECT_EQ(cudaFreeAsync(pair.data, pair.writer), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(pair.data, 1, kBytes, pair.writer), cudaSuccess);
  while (cudaStreamQuery(pair.writer) == cudaErrorNotReady) {
  }
  ASSERT_FALSE(problems().empty());
  EXPECT_TRUE(says(problems().front(), "given back"));
}

TEST(FakeCuda, NoticesAccessBeyondTheEnd) {
  const Pair pair = set_up(4);
  EXPECT_EQ(cudaMemcpyAsync(pair.host, pair.data, kBytes + 1, cudaMemcpyDefault, pair.writer), cudaSuccess);
  while (cudaStreamQuery(pair.writer) == cudaErrorNotReady) {
  }
  ASSERT_FALSE(problems().empty());
  EXPECT_TRUE(says(problems().front(), "beyond the end"));
}

TEST(FakeCuda, NoticesACallThatMakesAContext) {
  boot({.device_count = 2});
  std::thread([] {
    cudaEvent_t event = nullptr;
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_TRUE(problems().empty()) << "asking makes none";
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(problems().size(), 1U);
    EXPECT_TRUE(says(problems().front(), "cudaEventCreateWithFlags on a thread without a context"));
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(problems().size(), 1U) << "from now on it has one";
  }).join();
}

TEST(FakeCudaDeathTest, EndsTheProgramWhereCudaIsSilent) {
  const Pair pair = set_up(5);
  EXPECT_DEATH(static_cast<void>(cudaStreamWaitEvent(pair.reader, pair.written, 0)), "never recorded");
  EXPECT_DEATH(static_cast<void>(cudaEventQuery(pair.written)), "never recorded");
  EXPECT_DEATH(static_cast<void>(cudaMemsetAsync(pair.data, 0, 1, nullptr)), "legacy default stream");
  EXPECT_DEATH(static_cast<void>(cudaFreeAsync(static_cast<char*>(pair.data) + 1, pair.writer)), "never taken");
}

void lazy_kernel(int) {}

/// A kernel as nvcc registers it, which is loaded by its first launch.
void launch_lazy(cudaStream_t stream) {
  static const bool registered = [] {
    __cudaRegisterFunction(nullptr, reinterpret_cast<const char*>(&lazy_kernel), nullptr, "lazy_kernel", 0, nullptr,
                           nullptr, nullptr, nullptr, nullptr);
    return true;
  }();
  static_cast<void>(registered);
  twin(&lazy_kernel, [](const Launch&, int) {});
  int value = 0;
  void* arguments[] = {&value};
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&lazy_kernel), dim3(1), dim3(1), arguments, 0, stream),
            cudaSuccess);
}

TEST(FakeCuda, WaitsForTheDeviceAtTheFirstLaunchOfAKernel) {
  const Pair pair = set_up(10);
  EXPECT_EQ(cudaMemsetAsync(pair.data, 7, kBytes, pair.writer), cudaSuccess);
  launch_lazy(pair.reader);
  EXPECT_EQ(static_cast<unsigned char*>(pair.data)[0], 7) << "all that was enqueued before has run";
  EXPECT_TRUE(problems().empty());
}

/// As between the first and the last launch of a collective's kernels, which wait for each other.
TEST(FakeCuda, NoticesAFirstLaunchThatWouldWaitForItself) {
  for (const bool loaded : {false, true}) {
    const Pair pair = set_up(10);
    cudaFuncAttributes attributes{};
    if (loaded) {
      EXPECT_EQ(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&lazy_kernel)), cudaSuccess);
    }
    hang(pair.writer);
    EXPECT_EQ(cudaMemsetAsync(pair.data, 7, kBytes, pair.writer), cudaSuccess);
    launch_lazy(pair.reader);
    EXPECT_EQ(problems().size(), loaded ? 0U : 1U);
    if (!loaded) {
      EXPECT_TRUE(says(problems().front(), "the first launch of lazy_kernel"));
    }
    launch_lazy(pair.reader);
    EXPECT_EQ(problems().size(), loaded ? 0U : 1U) << "only the first one loads";
  }
}

TEST(FakeCuda, WaitsWhereAQueueIsFullAndNoticesADeadlock) {
  const Pair pair = set_up(11);
  const auto fill = [&] {
    for (int k = 0; k < 2000; ++k) EXPECT_EQ(cudaMemsetAsync(pair.data, 7, kBytes, pair.writer), cudaSuccess);
  };
  fill();
  EXPECT_LE(leftovers().queued, 1024U);
  EXPECT_TRUE(problems().empty());
  hang(pair.writer);
  fill();
  ASSERT_FALSE(problems().empty());
  EXPECT_TRUE(says(problems().front(), "the queue of a stream is full"));
}

TEST(FakeCuda, CountsWhatIsLeft) {
  const Pair pair = set_up(8);
  EXPECT_EQ(leftovers().device_allocations, 2U);
  EXPECT_EQ(leftovers().host_allocations, 1U);
  EXPECT_EQ(leftovers().streams, 2U);
  EXPECT_EQ(cudaFreeAsync(pair.data, pair.writer), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(pair.copy, pair.reader), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(pair.writer), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(pair.reader), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(pair.written), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pair.host), cudaSuccess);
  EXPECT_EQ(cudaMemPoolDestroy(pair.pool), cudaSuccess);
  EXPECT_EQ(leftovers(), Leftovers{});
  EXPECT_TRUE(problems().empty());
}

}  // namespace
}  // namespace fake

// SPDX-License-Identifier: Apache-2.0
//
// NCCL between GPUs: slow, broken or stuck.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

#include "interrupts.hpp"
#include "nccl_bench.hpp"
#include "nccl_communicators.hpp"
#include "nccl_machine.hpp"
#include "orders.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(NcclLink, ConnectsAllGpusAtOnceAndEndsThemTogether) {
  for_each_order(kOrders, 4, [&](fake::Nccl& nccl, std::uint64_t seed) {
    {
      Bench bench(2 + static_cast<int>(seed % 3), seconds(30), 8192);
      ASSERT_EQ(nccl.made(), static_cast<int>(bench.group.size()));
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    }
    ASSERT_EQ(nccl.aborted(), 0);
  });
}

TEST(NcclLink, OfTwoThreadsDoNotMix) {
  for_each_order(kOrders / 10, 2, [&](fake::Nccl&, std::uint64_t) {
    std::vector<std::jthread> threads;
    for (int k = 0; k < 2; ++k) {
      threads.emplace_back([] {
        Bench bench(2, seconds(30), 64);
        for (int repeat = 0; repeat < 5; ++repeat) ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      });
    }
  });
}

TEST(NcclLink, RefusesBlockingLaunches) {
  boot(1, 2);
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  const auto error = thrown_by<Unavailable>([] { Bench bench(2); });
  setenv("CUDA_LAUNCH_BLOCKING", "0", 1);
  EXPECT_TRUE(says(error, "CUDA_LAUNCH_BLOCKING is set")) << error.what();
  Bench bench(2);
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

TEST(NcclLink, NamesTheDeviceAndTheCallThatFailed) {
  for (const char* const function : {"ncclAllReduce", "ncclGroupStart", "ncclGroupEnd"}) {
    for_each_order(50, 3, [&](fake::Nccl& nccl, std::uint64_t) {
      Bench bench(3);
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      const bool one = std::string(function) == "ncclAllReduce";
      nccl.fail(function, one ? 1 : fake::Nccl::kAnyRank, nccl::kUnhandledCudaError);
      const auto error = thrown_by<Error>([&] { bench.reduce(); });
      ASSERT_TRUE(says(error, "unhandled cuda error (NCCL error 1)") && says(error, "as was ordered"));
      ASSERT_EQ(error.device(), one ? "cuda:1" : "") << error.what();
      ASSERT_EQ(nccl.aborted(), 3) << "all of them, or what they share is never freed";
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      ASSERT_EQ(nccl.made(), 6);
    });
  }
}

TEST(NcclLink, ScattersAndGathersAndNamesThoseCallsToo) {
  for (const char* const function : {"ncclReduce", "ncclBroadcast"}) {
    for (const bool hangs : {false, true}) {
      fake::Nccl& nccl = boot(1, 2);
      {
        Bench bench(2, milliseconds(200));
        GpuArrays whole(bench.group, 8);
        const std::vector<float> twos(8, 2.0F);
        for (std::size_t d = 0; d < 2; ++d) {
          whole.fill(d, twos);
          bench.arrays.fill(d, bench.ones);
        }
        const auto call = [&] {
          if (std::string(function) == "ncclBroadcast") {
            bench.communicator.all_gather(bench.arrays.views(), whole.views());
          } else {
            bench.communicator.reduce_scatter(whole.views(), bench.arrays.views());
          }
          bench.communicator.wait();
        };
        hangs ? nccl.hang() : nccl.fail(function, 1, nccl::kUnhandledCudaError);
        const auto error = thrown_by<Error>(call);
        EXPECT_TRUE(says(error, std::string(function) + (hangs ? " did not end within" : " failed"))) << error.what();
        EXPECT_NO_THROW(call());
        EXPECT_EQ(nccl.made(), 4);
      }
      ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
    }
  }
}

/// NCCL's drop NaNs. Integers have none.
TEST(NcclLink, LeavesExtremaOfFloatingPointElementsToCopies) {
  fake::Nccl& nccl = boot(1, 2);
  Bench bench(2);
  std::vector<BufferView> integers = bench.arrays.views();
  for (BufferView& view : integers) view.dtype = DType::int32;
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    nccl.fail("ncclAllReduce", 1, nccl::kUnhandledCudaError);
    EXPECT_NO_THROW(bench.communicator.all_reduce(bench.arrays.views(), op));
    bench.communicator.wait();
    EXPECT_THROW(bench.communicator.all_reduce(integers, op), Error);
  }
}

TEST(NcclLink, SaysThatItCannotConnect) {
  for (const char* const function : {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclGroupEnd"}) {
    fake::Nccl& nccl = boot(1, 2);
    const bool one = std::string(function) == "ncclCommInitRankConfig";
    nccl.fail(function, one ? 1 : fake::Nccl::kAnyRank, nccl::kSystemError);
    const auto error = thrown_by<Error>([] { Bench bench(2); });
    EXPECT_TRUE(says(error, "NCCL error 2")) << error.what();
    EXPECT_EQ(error.device(), one ? "cuda:1" : "");
    ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
  }
}

TEST(NcclLink, FindsAHangInItsWarmUp) {
  fake::Nccl& nccl = boot(1, 2);
  nccl.hang();
  const auto error = thrown_by<Timeout>([] { Bench bench(2, milliseconds(200), 64); });
  EXPECT_TRUE(says(error, "cuda:0, cuda:1: ncclAllReduce did not end within 0.2 s")) << error.what();
  EXPECT_TRUE(says(error, "NCCL_P2P_DISABLE=1")) << error.what();
  EXPECT_EQ(nccl.aborted(), 2);
  ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
}

TEST(NcclLink, EndsACollectiveThatHangsAndGoesOnWithNewConnections) {
  for_each_order(8, 3, [&](fake::Nccl& nccl, std::uint64_t) {
    Bench bench(3, milliseconds(200));
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    nccl.hang();
    bench.reduce();
    const auto error = thrown_by<Timeout>([&] { bench.communicator.wait(); });
    ASSERT_TRUE(says(error, "ncclAllReduce did not end within 0.2 s")) << error.what();
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    ASSERT_EQ(nccl.aborted(), 3);  // by now: the error is told first
  });
}

/// Two GPUs with one number each.
struct TwoNumbers {
  TwoNumbers() {
    const DeviceGroup group = gpus(2);
    for (const Device& device : group.devices()) {
      const std::shared_ptr<AsyncDevice> opened = backend_of(device).open(device);
      endpoints.push_back({device, opened, opened->make_stream()});
      memory.push_back(opened->allocate(sizeof(float), *endpoints.back().stream));
      buffers.push_back(memory.back()->data());
      endpoints.back().stream->zero(buffers.back(), sizeof(float));
    }
  }

  void reduce(nccl::Communicators& communicators) const {
    communicators.all_reduce(buffers, 1, DType::float32, ReduceOp::sum);
  }

  std::vector<internal::Endpoint> endpoints;
  std::vector<std::unique_ptr<Buffer>> memory;
  std::vector<void*> buffers;
};

void look_after_all(nccl::Communicators& communicators) {
  while (communicators.look_after()) std::this_thread::sleep_for(milliseconds(1));
}

TEST(NcclCommunicators, UseTheEventsOfEarlierCollectivesAgain) {
  fake::Nccl& nccl = boot(1, 2);
  {
    const TwoNumbers numbers;
    nccl::Communicators communicators(nccl::library(), numbers.endpoints, seconds(30));
    communicators.open(0);
    numbers.reduce(communicators);
    look_after_all(communicators);
    const int made = fake::made_events();
    for (int k = 0; k < 3; ++k) {
      numbers.reduce(communicators);
      look_after_all(communicators);
    }
    EXPECT_EQ(fake::made_events(), made);
    communicators.close();
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
}

TEST(NcclCommunicators, RefuseWorkAfterAnAbortThatSomebodyHasHeardOf) {
  fake::Nccl& nccl = boot(1, 2);
  {
    const TwoNumbers numbers;
    nccl::Communicators communicators(nccl::library(), numbers.endpoints, milliseconds(30));
    communicators.open(0);
    nccl.hang();
    numbers.reduce(communicators);
    look_after_all(communicators);
    EXPECT_THROW(communicators.check(), Timeout);
    const auto error = thrown_by<Error>([&] { numbers.reduce(communicators); });
    EXPECT_TRUE(says(error, "cuda:0, cuda:1: ncclAllReduce: all connections were given up")) << error.what();
    EXPECT_EQ(nccl.calls("ncclAllReduce"), 2) << "a call with communicators that are gone";
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
}

TEST(NcclLink, GivesTheHostNothingOfAnAbortedCollective) {
  fake::Nccl& nccl = boot(1, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1", "host:0"});
  Communicator communicator(group, {.timeout = milliseconds(200), .warm_up_bytes = 0});
  GpuArrays arrays(group, 4);
  const std::vector<float> ones(4, 1.0F);
  for (std::size_t d = 0; d < 3; ++d) arrays.fill(d, ones);
  nccl.hang();
  EXPECT_THROW(communicator.all_reduce(arrays.views()), Timeout);
  std::vector<float> host;
  arrays.read(2, host);
  EXPECT_EQ(host, ones);
}

TEST(NcclLink, WaitsForSlowProducersWithoutEnd) {
  fake::Nccl& nccl = boot(1, 2);
  Bench bench(2, milliseconds(200));
  const auto late = bench.arrays.views()[1].stream;
  fake::hang(late);
  bench.reduce();
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(nccl.aborted(), 0) << "that a GPU comes late is no fault of the collective";
  fake::go_on(late);
  ASSERT_NO_FATAL_FAILURE(bench.expect_right());
}

TEST(NcclLink, TakesItsTimeWhereCallsAreSlow) {
  fake::Nccl& nccl = boot(1, 2);
  Bench bench(2, seconds(10));
  nccl.delay("ncclAllReduce", 1, milliseconds(50));
  nccl.delay("ncclGroupEnd", fake::Nccl::kAnyRank, milliseconds(50));
  ASSERT_NO_FATAL_FAILURE(bench.expect_right());
  EXPECT_EQ(nccl.aborted(), 0);
}

TEST(NcclLink, ReportsWhatACommunicatorSaysLater) {
  for_each_order(20, 3, [&](fake::Nccl& nccl, std::uint64_t) {
    Bench bench(3);
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    nccl.hang();
    bench.reduce();
    nccl.break_rank(2, nccl::kRemoteError);
    const auto error = thrown_by<Error>([&] { bench.communicator.wait(); });
    ASSERT_EQ(error.device(), "cuda:2") << error.what();
    ASSERT_TRUE(says(error, "NCCL error 6")) << error.what();
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
  });
}

TEST(NcclLink, LeavesAThreadBehindThatDoesNotComeBackAndNamesTheDevice) {
  fake::Nccl& nccl = boot(1, 2);
  {
    Bench bench(2, milliseconds(200));
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    nccl.hold("ncclAllReduce", 1);
    const auto error = thrown_by<Timeout>([&] { bench.reduce(); });
    EXPECT_EQ(error.device(), "cuda:1");
    EXPECT_TRUE(says(error, "cuda:1: NCCL did not come back from ncclAllReduce within 0.2 s")) << error.what();
    EXPECT_TRUE(says(thrown_by<Timeout>([&] { bench.reduce(); }), "left behind"));
    bench.arrays.wait();
  }
  EXPECT_EQ(nccl.inside(), 1) << "still there, and nobody waited for it";
  nccl.release();
  await_the_thread();
  EXPECT_EQ(fake::leftovers().streams, 0U);
}

TEST(NcclLink, IsNotWaitedForWhoIsInterruptedWhileItConnects) {
  fake::Nccl& nccl = boot(1, 2);
  nccl.hold("ncclCommInitRankConfig", 1);
  {
    const Interrupting soon([&] { return nccl.inside() == 1; });
    EXPECT_THROW(Bench bench(2), Interrupt);
  }
  EXPECT_EQ(nccl.inside(), 1) << "it still connects";
  nccl.release();
  await_the_thread();
  ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
  EXPECT_EQ(nccl.made(), 2);
  EXPECT_EQ(nccl.aborted(), 0);
}

TEST(NcclLink, UsesTheConnectionsOfACallThatWasInterrupted) {
  fake::Nccl& nccl = boot(1, 2);
  {
    Bench bench(2, milliseconds(300));
    nccl.hang();
    bench.reduce();
    EXPECT_THROW(bench.communicator.wait(), Timeout);
    nccl.hold("ncclCommInitRankConfig", 1);
    {
      const Interrupting soon;
      EXPECT_THROW(bench.reduce(), Interrupt);
    }
    nccl.release();
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    EXPECT_EQ(nccl.made(), 4) << "those that hung, and those that the interrupted call has made";
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
}

TEST(NcclLink, IsNotWaitedForWhoIsInterruptedWhileItEnds) {
  fake::Nccl& nccl = boot(1, 2);
  {
    Bench bench(2);
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    nccl.hold("ncclCommDestroy", 1);
    const Interrupting soon([&] { return nccl.inside() == 1; });
    EXPECT_THROW(bench.communicator.close(), Interrupt);
    EXPECT_EQ(nccl.inside(), 1) << "it is still at it";
  }
  nccl.release();
  await_the_thread();
  EXPECT_EQ(nccl.communicators(), 0);
  EXPECT_EQ(nccl.problems(), std::vector<std::string>{});
}

TEST(NcclLink, NamesAllDevicesWhereTheEndOfAGroupHangs) {
  fake::Nccl& nccl = boot(1, 2);
  {
    Bench bench(2, milliseconds(200));
    nccl.hold("ncclGroupEnd", fake::Nccl::kAnyRank);
    const auto error = thrown_by<Timeout>([&] { bench.reduce(); });
    EXPECT_TRUE(says(error, "cuda:0, cuda:1: NCCL did not come back from ncclGroupEnd")) << error.what();
    EXPECT_EQ(error.device(), "");
  }
  nccl.release();
  await_the_thread();
  EXPECT_EQ(fake::leftovers().streams, 0U);
}

}  // namespace
}  // namespace paceline

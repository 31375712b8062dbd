// SPDX-License-Identifier: Apache-2.0
//
// The thread that enqueues the sums of four GPUs and more, so that the device that seals last goes on.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "interrupts.hpp"
#include "orders.hpp"
#include "pump_steps.hpp"
#include "queued_steps.hpp"
#include "sealed_buckets.hpp"

namespace paceline {
namespace {

const std::vector<std::string> kThree{"cuda:0", "cuda:1", "cuda:2"};

TEST(SumPump, GivesTheBitsOfTheHostWhenEachDeviceSealsOnAThreadOfItsOwn) {
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    Buckets buckets(group_of(kFour), {.chunk_bytes = seed % 2 == 0 ? std::size_t{25} << 20 : std::size_t{100'000}});
    for (int step = 0; step < 3; ++step) {
      buckets.begin();
      std::mutex marking;  // the buckets' list of marks
      std::vector<std::jthread> threads;
      for (const DeviceId d : buckets.queues.devices()) {
        threads.emplace_back([&, d] {
          std::minstd_rand random(static_cast<std::uint32_t>(seed + 8 * d.number() + step) + 1);
          buckets.queues.enter(d);
          for (std::size_t k = 0; k < std::size(kCounts); ++k) {
            ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, kSeeds[d.number()][k]));
            for (auto times = 1 + random() % 2; times > 0; --times) {  // perhaps again, by another event
              NativeEvent mark = nullptr;
              if (random() % 2 == 0) {
                const std::lock_guard lock(marking);
                mark = buckets.mark(d);
              }
              buckets.queues.seal(d, k, buckets.view(d, k), mark);
            }
          }
          buckets.deliver(d, {true, true, true});
        });
      }
      threads.clear();
      buckets.end();
      ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(kSeeds)) << "step " << step;
    }
  });
}

TEST(SumPump, LetsWhoSealsGoOn) {
  boot_with_writes(1, 4);
  {
    Buckets buckets(group_of(kFour), {});
    std::atomic<bool> goes_on{false};
    buckets.begin();
    ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
    fake::set_before_copy([&, caller = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == caller) return cudaErrorUnknown;  // seal() would throw
      while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return cudaSuccess;
    });
    seal_all(buckets);
    goes_on = true;
    await_the_pump(buckets);
    fake::set_before_copy(nullptr);
    deliver_all(buckets);
    buckets.end();
    ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(kSeeds));
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(SumPump, IsThereFromFourGpusOnAndWithoutCollectives) {
  const std::set<std::thread::id> this_one{std::this_thread::get_id()};
  for (const bool four : {false, true}) {
    boot_with_writes(1, 4);
    Buckets buckets(group_of(four ? kFour : kThree), {});
    const Copiers copiers;
    ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
    await_the_pump(buckets);
    EXPECT_GT(copiers.count(), 0);
    EXPECT_EQ(copiers.threads() == this_one, !four);
    EXPECT_EQ(has_thread(kThread), four);
  }
  EXPECT_FALSE(has_thread(kThread));
  boot_with_writes(1, 4);
  const Buckets buckets(group_of(kFour), {.collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
  EXPECT_FALSE(has_thread(kThread));
}

TEST(SumPump, TellsInTheStepWhichCopyFailedAndTheNextStepWorks) {
  boot_with_writes(1, 4);
  {
    Buckets buckets(group_of(kFour), {});
    ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets));
    const int copies = [&] {
      const Copiers copiers;
      EXPECT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      await_the_pump(buckets);
      return copiers.count();
    }();
    ASSERT_GT(copies, 20);
    for (int k = 0; k < copies; ++k) {
      std::atomic<int> left{k};
      fake::set_before_copy([&left] { return left-- == 0 ? cudaErrorUnknown : cudaSuccess; });
      try {
        ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));  // who seals after that is told, too
        buckets.queues.reduce();
        ADD_FAILURE() << "copy " << k << " failed, and nobody says so";
      } catch (const Error& error) {
        EXPECT_EQ(error.device().substr(0, 5), "cuda:") << error.what();
      }
      EXPECT_LE(left, 0);
      fake::set_before_copy(nullptr);
      buckets.queues.drain();
      ASSERT_EQ(fake::leftovers().queued, 0U);
      ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets)) << "after copy " << k;
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(SumPump, EnqueuesNothingOfBucketsThatADeviceHasNotSealed) {
  for_each_order(kOrders / 16, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    Buckets buckets(group_of(kFour), {});
    buckets.begin();
    ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
    {
      const Copiers copiers;
      for (const DeviceId d : buckets.queues.devices()) {
        if (d.number() != seed % 4) buckets.queues.seal(d, 0, buckets.view(d, 0));
        buckets.queues.seal(d, 1, buckets.view(d, 1));  // comes after the first one
      }
      buckets.queues.drain();  // a device has failed
      EXPECT_EQ(copiers.count(), 0);
    }
    ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets));
  });
}

TEST(SumPump, IsWaitedForByWhoeverEndsTheQueuesOrDrainsThem) {
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    Buckets buckets(group_of(kFour), {});
    fake::set_before_copy([] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      return cudaSuccess;
    });
    ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
    if (seed % 2 == 0) return;  // ends them
    buckets.queues.drain();
    ASSERT_EQ(fake::leftovers().queued, 0U);
    ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets));
  });
}

TEST(SumPump, TellsInTheStepThatThereIsNoMemoryAndTheNextStepWorks) {
  int failed = 0;
  for (int allocation = 0; allocation == failed; ++allocation) {  // until none is left that could fail
    boot_with_writes(1, 4);
    {
      Buckets buckets(group_of(kFour), {});
      buckets.begin();
      ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
      fake::fail_allocation(allocation);
      try {
        seal_all(buckets);
        deliver_all(buckets);
        buckets.end();
        ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(kSeeds)) << "allocation " << allocation;
      } catch (const OutOfMemory&) {
        ++failed;
        buckets.queues.drain();
        ASSERT_EQ(fake::leftovers().queued, 0U);
      }
      fake::fail_allocation(-1);
      ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets)) << "after allocation " << allocation;
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean());
  }
  EXPECT_GT(failed, 12);
}

TEST(SumPump, ThatGotNoMemoryTellsWhoSealsNextAndLeavesTheNextSumsToThoseWhoSeal) {
  boot_with_writes(1, 4);
  {
    Buckets buckets(group_of(kFour), {});
    const std::vector<DeviceId> devices = buckets.queues.devices();
    for (const bool by_pump : {true, false}) {
      buckets.begin();
      ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
      fake::fail_allocation(0);
      for (const DeviceId d : devices) {
        if (by_pump || d != devices.back()) {
          EXPECT_NO_THROW(buckets.queues.seal(d, 0, buckets.view(d, 0)));
        } else {
          EXPECT_THROW(buckets.queues.seal(d, 0, buckets.view(d, 0)), OutOfMemory);
        }
      }
      await_the_pump(buckets);
      for (const DeviceId d : devices) {
        if (!by_pump) break;
        EXPECT_THROW(buckets.queues.seal(d, 1, buckets.view(d, 1)), OutOfMemory);
      }
      buckets.queues.drain();
      ASSERT_EQ(fake::leftovers().queued, 0U);
    }
    for (const bool by_pump : {false, true}) {
      {
        const Copiers copiers;
        ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
        await_the_pump(buckets);
        EXPECT_EQ(copiers.threads() != std::set{std::this_thread::get_id()}, by_pump);
      }
      buckets.end();
      ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(kSeeds));
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(SumPump, TellsItsErrorToWhoWouldMeetOneThatFollowsFromIt) {
  boot_with_writes(1, 4);
  Buckets buckets(group_of(kFour), {});
  buckets.begin();
  ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
  fake::set_before_copy([] {
    fake::poison(2, cudaErrorIllegalAddress);
    return cudaErrorIllegalAddress;
  });
  for (const DeviceId d : buckets.queues.devices()) buckets.queues.seal(d, 0, buckets.view(d, 0));
  await_the_pump(buckets);
  fake::set_before_copy(nullptr);
  try {
    buckets.queues.seal(2, 1, buckets.view(2, 1));
    ADD_FAILURE() << "a copy has failed, and nobody says so";
  } catch (const DeviceLost& error) {
    EXPECT_NE(std::string(error.what()).find("copying"), std::string::npos) << error.what();
  }
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not support threads in a forked child
TEST(SumPump, IsNotAwaitedInAForkedChild) {
  boot_with_writes(1, 4);
  {
    std::optional<Buckets> buckets;
    buckets.emplace(group_of(kFour), DeviceQueueOptions{});
    ASSERT_NO_FATAL_FAILURE(expect_a_step(*buckets));
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      buckets.reset();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ASSERT_NO_FATAL_FAILURE(expect_a_step(*buckets));
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}
#endif

void expect_a_timeout(Buckets& buckets, int device) {
  try {
    buckets.queues.reduce();
    ADD_FAILURE() << "it does not come back, and nobody says so";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.device(), "cuda:" + std::to_string(device));
    EXPECT_NE(std::string(error.what()).find(error.device()), std::string::npos) << error.what();
  }
}

TEST(SumPump, IsLeftBehindWhereCudaDoesNotComeBackAndEnqueuesNothingMore) {
  for (const bool ends_first : {false, true}) {  // the queues, before the call comes back
    boot_with_writes(1, 4, 4);
    HangingCopy copy;
    {
      // Long against the pauses of a busy machine, in which another copy than the one that hangs would be late.
      Buckets buckets(group_of(kFour), {.timeout = std::chrono::seconds(1)});
      copy.arm(1, ends_first ? cudaErrorUnknown : cudaSuccess);
      ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      copy.await();
      ASSERT_NO_FATAL_FAILURE(expect_a_timeout(buckets, 1));
      buckets.queues.drain();
      EXPECT_THROW(buckets.begin(), DeviceLost);
      EXPECT_TRUE(has_thread(kThread));
      if (!ends_first) copy.end();
    }
    copy.end();
    EXPECT_EQ(copy.copies, 2);
  }
}

TEST(SumPump, EnqueuesNothingMoreInWhicheverCopyItIsLeftBehind) {
  for (const std::optional<DType> travels : {std::optional<DType>(), std::optional(DType::bfloat16)}) {
    boot_with_writes(1, 4, 4);
    const int copies = [&] {
      Buckets buckets(group_of(kFour), {.reduce_dtype = travels});
      const Copiers copiers;
      EXPECT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      await_the_pump(buckets);
      return copiers.count();
    }();
    ASSERT_EQ(copies, (9 + 3) + 3 + (9 + 3)) << "of the two large buckets home pulls three slices";
    for (int which = 0; which < copies; ++which) {
      boot_with_writes(1, 4, 4);
      HangingCopy copy;
      Buckets buckets(group_of(kFour), {.timeout = kShort, .reduce_dtype = travels});
      buckets.begin();
      ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
      hang_all_streams(buckets.queues);
      copy.arm(which);
      seal_all(buckets);
      deliver_all(buckets);
      copy.await();
      ASSERT_NO_FATAL_FAILURE(expect_a_timeout(buckets, copy.device)) << "copy " << which;
      const std::size_t queued = fake::leftovers().queued;
      copy.end();
      EXPECT_EQ(copy.copies, which + 1);
      EXPECT_EQ(fake::leftovers().queued, queued + 1) << "after copy " << which;  // the copy itself
    }
  }
}

TEST(SumPump, EnqueuesNothingMoreForWhoIsInterruptedWhileItDrains) {
  boot_with_writes(1, 4, 4);
  {
    std::optional<HangingCopy> copy(std::in_place);
    Buckets buckets(group_of(kFour), {});
    copy->arm(10);  // home's second one of the first bucket
    ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
    copy->await();
    {
      const Interrupting soon;
      EXPECT_THROW(buckets.queues.drain(), Interrupt);
    }
    copy->comes_back = true;
    await_the_pump(buckets);
    EXPECT_EQ(copy->copies, 11);
    copy.reset();
    ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets));
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(SumPump, IsNotAwaitedForLongByWhoIsInterruptedWhileItEnds) {
  boot_with_writes(1, 4, 4);
  HangingCopy copy;
  {
    std::optional<Interrupting> soon;
    Buckets buckets(group_of(kFour), {});  // waits for ten minutes
    copy.arm(10, cudaErrorUnknown);        // its memory is gone when it comes back
    ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
    copy.await();
    soon.emplace();
  }
  EXPECT_TRUE(has_thread(kThread));
  copy.end();
}

}  // namespace
}  // namespace paceline

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
#include "orders.hpp"
#include "queued_steps.hpp"
#include "sealed_buckets.hpp"

namespace paceline {
namespace {

const std::vector<std::string> kFour{"cuda:0", "cuda:1", "cuda:2", "cuda:3"};
const std::vector<std::string> kThree{"cuda:0", "cuda:1", "cuda:2"};
const std::vector<std::vector<std::uint32_t>> kSeeds{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {10, 11, 12}};
constexpr const char* kThread = "pl sums";

void enter_and_fill(Buckets& buckets) {
  for (const DeviceId d : buckets.queues.devices()) {
    buckets.queues.enter(d);
    for (std::size_t k = 0; k < std::size(kCounts); ++k) {
      ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, kSeeds[d.number()][k]));
    }
  }
}

void seal_all(Buckets& buckets) {
  for (std::size_t k = 0; k < std::size(kCounts); ++k) {
    for (const DeviceId d : buckets.queues.devices()) buckets.queues.seal(d, k, buckets.view(d, k));
  }
}

/// A step up to its reduction, on this thread.
void begin_and_seal(Buckets& buckets) {
  buckets.begin();
  ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
  seal_all(buckets);
  for (const DeviceId d : buckets.queues.devices()) buckets.deliver(d, {true, true, true});
}

void expect_a_step(Buckets& buckets) {
  ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
  buckets.end();
  const auto count = static_cast<std::ptrdiff_t>(buckets.queues.devices().size());
  ASSERT_NO_FATAL_FAILURE(buckets.expect_sums({kSeeds.begin(), kSeeds.begin() + count}));
}

/// Which threads enqueue copies, from now until its end.
class Copiers {
 public:
  Copiers() {
    fake::set_before_copy([this] {
      const std::lock_guard lock(mutex_);
      threads_.insert(std::this_thread::get_id());
      ++count_;
      return cudaSuccess;
    });
  }
  ~Copiers() { fake::set_before_copy(nullptr); }
  Copiers(const Copiers&) = delete;
  Copiers& operator=(const Copiers&) = delete;

  [[nodiscard]] std::set<std::thread::id> threads() const {
    const std::lock_guard lock(mutex_);
    return threads_;
  }
  [[nodiscard]] int count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::thread::id> threads_;
  int count_ = 0;
};

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
    static_cast<void>(buckets.queues.copy_stream(1));  // waits for the pump
    fake::set_before_copy(nullptr);
    for (const DeviceId d : buckets.queues.devices()) buckets.deliver(d, {true, true, true});
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
    static_cast<void>(buckets.queues.copy_stream(1));  // waits for the pump
    EXPECT_GT(copiers.count(), 0);
    EXPECT_EQ(copiers.threads() == this_one, !four);
    EXPECT_EQ(has_thread(kThread), four);
  }
  EXPECT_FALSE(has_thread(kThread));
  boot_with_writes(1, 4);
  const Buckets buckets(group_of(kFour), {.collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
  EXPECT_FALSE(has_thread(kThread));
}

TEST(SumPump, TellsInTheReductionWhichCopyFailedAndTheNextStepWorks) {
  boot_with_writes(1, 4);
  {
    Buckets buckets(group_of(kFour), {});
    ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets));
    const int copies = [&] {
      const Copiers copiers;
      EXPECT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      buckets.queues.drain();
      return copiers.count();
    }();
    ASSERT_GT(copies, 20);
    for (int k = 0; k < copies; ++k) {
      std::atomic<int> left{k};
      fake::set_before_copy([&left] { return left-- == 0 ? cudaErrorUnknown : cudaSuccess; });
      ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      try {
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

TEST(SumPump, TellsInTheReductionThatThereIsNoMemoryAndTheNextStepWorks) {
  int failed = 0;
  for (int allocation = 0; allocation == failed; ++allocation) {  // until none is left that could fail
    boot_with_writes(1, 4);
    {
      Buckets buckets(group_of(kFour), {});
      buckets.begin();
      ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
      fake::fail_allocation(allocation);
      seal_all(buckets);
      for (const DeviceId d : buckets.queues.devices()) buckets.deliver(d, {true, true, true});
      try {
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

TEST(SumPump, IsLeftBehindWhereCudaDoesNotComeBackAndEnqueuesNothingMore) {
  for (const bool ends_first : {false, true}) {  // the queues, before the call comes back
    boot_with_writes(1, 4, 4);
    std::atomic<bool> comes_back{false};
    std::atomic<int> copies{0};
    {
      Buckets buckets(group_of(kFour), {.timeout = std::chrono::milliseconds(50)});
      fake::set_before_copy([&] {
        if (++copies < 2) return cudaSuccess;
        while (!comes_back) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return ends_first ? cudaErrorUnknown : cudaSuccess;
      });
      ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      try {
        buckets.queues.reduce();
        ADD_FAILURE() << "it does not come back, and nobody says so";
      } catch (const Timeout& error) {
        EXPECT_EQ(error.device(), "cuda:1");
        EXPECT_NE(std::string(error.what()).find(error.device()), std::string::npos) << error.what();
      }
      buckets.queues.drain();
      EXPECT_THROW(buckets.begin(), DeviceLost);
      EXPECT_TRUE(has_thread(kThread));
      if (!ends_first) {
        comes_back = true;
        await_the_thread(kThread);
      }
    }
    comes_back = true;
    await_the_thread(kThread);  // it has freed what it used
    EXPECT_EQ(copies, 2);
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

}  // namespace
}  // namespace paceline

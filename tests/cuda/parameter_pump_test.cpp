// SPDX-License-Identifier: Apache-2.0
//
// The thread that enqueues the copies of parameters for four GPUs and more, so that the caller and the first GPU go on.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
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

/// Parameters in a bucket each, and what the devices have read of them.
class Parameters {
 public:
  explicit Parameters(const DeviceQueueOptions& options = {}, const std::vector<std::string>& names = kFour)
      : group_(group_of(names)), queues(group_, options) {
    for (std::size_t k = 0; k < std::size(kCounts); ++k) {
      for (std::size_t s = 0; s < queues.space_count(); ++s) {
        Stream* const stream = s == 0 ? &queues.home_stream() : queues.copy_stream(s);
        memory_.push_back(queues.allocate(s, bytes(k), stream));
        if (s > 0) copies_.push_back({s, at(s, k), at(0, k), bytes(k), k});
      }
      for (std::size_t d = 0; d < group_.size(); ++d) seen_.push_back(queues.maker(0).allocate_pinned(bytes(k)));
    }
  }
  ~Parameters() {
    try {
      queues.drain();
    } catch (const Interrupt&) {
    }
    seen_.clear();  // pinned memory, while nothing runs
  }

  void begin() {
    ++step_;
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    for (std::size_t k = 0; k < std::size(kCounts); ++k)
      launch(&write_kernel, queues.home_stream(), value(at(0, k), k));
    times_ = queues.begin_step(copies_);
    queues.expect({}, 1.0);
  }
  void read(DeviceId d, std::size_t k) {
    queues.need(d, k);
    queues.stream(d)->copy(seen(d, k), at(queues.space_of(d), k), bytes(k));
  }
  void read_all(DeviceId d, bool at_once = false) {
    queues.enter(d, at_once);
    for (std::size_t k = 0; k < std::size(kCounts); ++k) read(d, k);
  }
  void end() {
    for (const DeviceId d : queues.devices()) queues.deliver(d, {});
    queues.reduce();
    queues.end_step();
    times_->wait();
    for (std::size_t k = 0; k < std::size(kCounts); ++k) {
      std::vector<float> wanted(kCounts[k]);
      write(value(wanted.data(), k));
      for (const DeviceId d : queues.devices()) {
        ASSERT_EQ(std::memcmp(wanted.data(), seen(d, k), bytes(k)), 0) << "bucket " << k << " of " << d.number();
      }
    }
  }
  void expect_a_step() {
    ASSERT_NO_FATAL_FAILURE(begin());
    for (const DeviceId d : queues.devices()) read_all(d);
    ASSERT_NO_FATAL_FAILURE(end());
  }
  void await_the_pump() { static_cast<void>(queues.copy_stream(1)); }

 private:
  static std::size_t bytes(std::size_t k) { return kCounts[k] * sizeof(float); }
  [[nodiscard]] void* at(std::size_t space, std::size_t k) const {
    return memory_[k * queues.space_count() + space]->data();
  }
  [[nodiscard]] void* seen(DeviceId d, std::size_t k) const { return seen_[k * group_.size() + d.number()]->data(); }
  [[nodiscard]] Write value(void* to, std::size_t k) const {
    return {static_cast<float*>(to), kCounts[k], static_cast<std::uint32_t>(10 * step_ + k)};
  }

  DeviceGroup group_;
  std::vector<std::unique_ptr<Buffer>> seen_;
  std::vector<SpaceCopy> copies_;
  std::shared_ptr<const StepTimes> times_;
  std::size_t step_ = 0;

 public:
  DeviceQueues queues;

 private:
  std::vector<std::unique_ptr<Buffer>> memory_;  // gone before the queues
};

std::vector<DeviceId> others(const Parameters& parameters) {
  std::vector<DeviceId> devices = parameters.queues.devices();
  devices.erase(devices.begin());
  return devices;
}

/// How many copies bring the parameters. The second bucket is too small to be relayed.
int copies_of_a_step() {
  boot_with_writes(1, 4, 4);
  Parameters parameters;
  const Copiers copiers;
  EXPECT_NO_FATAL_FAILURE(parameters.begin());
  parameters.await_the_pump();
  EXPECT_EQ(copiers.count(), 9);
  return copiers.count();
}

TEST(ParameterPump, GivesEachDeviceWhatItReadsWhereverItBegins) {
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4, seed % 3 == 0 ? 1 : 4);  // also through the host
    Parameters parameters;
    for (std::uint64_t step = 0; step < 3; ++step) {
      ASSERT_NO_FATAL_FAILURE(parameters.begin());
      std::vector<std::jthread> threads;
      for (const DeviceId d : parameters.queues.devices()) {
        threads.emplace_back([&, d] { parameters.read_all(d, (seed >> d.number() & 1) != step % 2); });
      }
      threads.clear();
      ASSERT_NO_FATAL_FAILURE(parameters.end()) << "step " << step;
    }
  });
}

TEST(ParameterPump, LetsTheCallerAndTheFirstGpuGoOn) {
  boot_with_writes(1, 4);
  {
    Parameters parameters;
    std::atomic<bool> goes_on{false};
    fake::set_before_copy([&, caller = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == caller) return cudaErrorUnknown;  // begin_step() would throw
      while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return cudaSuccess;
    });
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    EXPECT_TRUE(parameters.queues.enter(0));
    parameters.queues.need(0, 2);
    goes_on = true;
    parameters.await_the_pump();
    fake::set_before_copy(nullptr);
    for (const DeviceId d : parameters.queues.devices()) parameters.read_all(d);
    ASSERT_NO_FATAL_FAILURE(parameters.end());
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(ParameterPump, IsThereFromFourGpusOn) {
  const std::set<std::thread::id> this_one{std::this_thread::get_id()};
  for (const bool four : {false, true}) {
    boot_with_writes(1, 4);
    Parameters parameters({}, four ? kFour : std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2"});
    const Copiers copiers;
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    parameters.await_the_pump();
    EXPECT_GT(copiers.count(), 0);
    EXPECT_EQ(copiers.threads() == this_one, !four);
  }
}

TEST(ParameterPump, LetsADeviceBeginWithTheBucketsThatAreEnqueued) {
  boot_with_writes(1, 4, 4);
  {
    HangingCopy copy;
    Parameters parameters;
    copy.arm(3);  // the first one of the second bucket
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    copy.await();
    std::atomic<bool> has_all{false};
    {
      const std::jthread at_once([&] {
        parameters.queues.enter(2);
        has_all = true;
      });
      const std::jthread by_bucket([&] {
        parameters.queues.enter(1, false);
        parameters.read(1, 0);
        parameters.read(1, 1);
        has_all = true;
      });
      while (copy.copies < 5) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it has read the first one
      std::this_thread::sleep_for(kShort);
      EXPECT_FALSE(has_all);
      copy.comes_back = true;
    }
    for (const DeviceId d : parameters.queues.devices()) parameters.read_all(d);
    ASSERT_NO_FATAL_FAILURE(parameters.end());
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(ParameterPump, TellsEachDeviceInTheStepWhichCopyFailedAndTheNextStepWorks) {
  const int copies = copies_of_a_step();
  boot_with_writes(1, 4, 4);
  {
    Parameters parameters;
    for (int k = 0; k < copies; ++k) {
      std::atomic<int> left{k};
      fake::set_before_copy([&left, caller = std::this_thread::get_id()] {
        return std::this_thread::get_id() != caller && left-- == 0 ? cudaErrorUnknown : cudaSuccess;
      });
      ASSERT_NO_FATAL_FAILURE(parameters.begin());
      for (const DeviceId d : others(parameters)) {
        try {
          parameters.read_all(d, d == 2);
          ADD_FAILURE() << "copy " << k << " failed, and nobody tells device " << d.number();
        } catch (const Error& error) {
          EXPECT_EQ(error.device().substr(0, 5), "cuda:") << error.what();
        }
      }
      EXPECT_THROW(parameters.queues.reduce(), Error);
      fake::set_before_copy(nullptr);
      parameters.queues.drain();
      ASSERT_EQ(fake::leftovers().queued, 0U);
      ASSERT_NO_FATAL_FAILURE(parameters.expect_a_step()) << "after copy " << k;
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(ParameterPump, IsLeftBehindInWhicheverCopyDoesNotComeBackAndEnqueuesNothingMore) {
  const int copies = copies_of_a_step();
  for (int which = 0; which < copies; ++which) {
    boot_with_writes(1, 4, 4);
    HangingCopy copy;
    Parameters parameters({.timeout = kShort});
    hang_all_streams(parameters.queues);
    copy.arm(which);
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    copy.await();
    for (const DeviceId d : others(parameters)) {
      try {
        if (parameters.queues.enter(d, d == 2)) parameters.queues.need(d, 2);
        ADD_FAILURE() << "copy " << which << " does not come back, and nobody says so";
      } catch (const Timeout& error) {
        EXPECT_EQ(error.device(), "cuda:" + std::to_string(copy.device)) << "copy " << which;
      }
    }
    const std::size_t queued = fake::leftovers().queued;
    copy.end();
    EXPECT_EQ(copy.copies, which + 1);
    EXPECT_EQ(fake::leftovers().queued, queued + 1) << "after copy " << which;  // the copy itself
    EXPECT_THROW(parameters.begin(), DeviceLost);
  }
}

TEST(ParameterPump, TellsThatThereIsNoMemoryAndLeavesTheNextStepToTheCaller) {
  boot_with_writes(1, 4, 1);
  {
    Parameters parameters;
    fake::fail_allocation(0);  // of pinned memory for what goes through the host
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    for (const DeviceId d : others(parameters)) EXPECT_THROW(parameters.read_all(d), OutOfMemory);
    parameters.queues.drain();
    ASSERT_EQ(fake::leftovers().queued, 0U);
    fake::fail_allocation(0);
    EXPECT_THROW(parameters.begin(), OutOfMemory);  // nothing has begun
    fake::fail_allocation(-1);
    for (const bool by_pump : {false, true}) {
      {
        const Copiers copiers;
        ASSERT_NO_FATAL_FAILURE(parameters.begin());
        parameters.await_the_pump();
        EXPECT_EQ(copiers.threads() != std::set{std::this_thread::get_id()}, by_pump);
      }
      for (const DeviceId d : parameters.queues.devices()) parameters.read_all(d);
      ASSERT_NO_FATAL_FAILURE(parameters.end());
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(ParameterPump, EnqueuesNothingMoreForWhoIsInterruptedWhileItDrainsAndTellsWhoWaits) {
  boot_with_writes(1, 4, 4);
  {
    std::optional<HangingCopy> copy(std::in_place);
    Parameters parameters;
    copy->arm(4);
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    copy->await();
    {
      const std::jthread waits([&] { EXPECT_THROW(parameters.queues.enter(1), Cancelled); });
      {
        const Interrupting soon;
        EXPECT_THROW(parameters.queues.drain(), Interrupt);
      }
      copy->comes_back = true;
    }
    parameters.await_the_pump();
    EXPECT_EQ(copy->copies, 5);
    copy.reset();
    parameters.queues.drain();  // a step that was left may still read parameters, which the next one writes
    ASSERT_NO_FATAL_FAILURE(parameters.expect_a_step());
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(ParameterPump, IsWaitedForByWhoeverEndsTheQueuesOrDrainsThem) {
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    Parameters parameters;
    fake::set_before_copy([] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      return cudaSuccess;
    });
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    if (seed % 2 == 0) return;  // ends them
    parameters.queues.drain();
    ASSERT_EQ(fake::leftovers().queued, 0U);
    ASSERT_NO_FATAL_FAILURE(parameters.expect_a_step());
  });
}

TEST(ParameterPump, LeftInACallDoesNotOutliveMemoryThatItUses) {
  boot_with_writes(1, 4, 4);
  HangingCopy copy;
  {
    std::optional<Interrupting> soon;
    Parameters parameters;          // waits for ten minutes
    copy.arm(4, cudaErrorUnknown);  // its memory is gone when it comes back
    ASSERT_NO_FATAL_FAILURE(parameters.begin());
    copy.await();
    soon.emplace();
  }
  EXPECT_TRUE(has_thread(kThread));
  copy.end();
}

}  // namespace
}  // namespace paceline

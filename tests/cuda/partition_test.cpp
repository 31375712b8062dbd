// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/partition.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "orders.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

std::unique_ptr<AsyncDevice> open(const Device& device) { return backend_of(device).open(device); }

std::vector<int> sms_of(const Stream& stream) { return fake::sms_of(stream.native()); }

/// A stream that was dropped with work left to do, and does nothing until fake::go_on().
cudaStream_t dropped_while_it_hangs(const Device& part) {
  const auto device = open(part);
  const auto stream = device->make_stream();
  const auto buffer = device->allocate(64, *stream);
  const auto native = stream->native();
  fake::hang(native);
  stream->zero(buffer->data(), 64);
  return native;
}

/// Ends each test with every GPU whole again, and nothing left of its parts.
class Partition : public ::testing::Test {
 protected:
  void SetUp() override { boot({}); }

  void TearDown() override {
    make_whole();
    EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
    EXPECT_TRUE(fake::problems().empty());
  }

  /// What the process knows of parts must not outlive the machine they were on.
  void boot(const fake::Settings& settings) {
    make_whole();
    gpus_ = settings.device_count;
    fake::boot(settings);
    fake::set_twins();
  }

 private:
  void make_whole() const {
    for (int gpu = 0; gpu < gpus_; ++gpu) release_partitions("cuda:" + std::to_string(gpu));
  }

  int gpus_ = 0;
};

TEST_F(Partition, NamesThePartsAndSaysWhatTheyGot) {
  const std::vector<Device> parts = partition("cuda:0", {0.75, 0.25});
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].name, "cuda:0/0");
  EXPECT_EQ(parts[1].name, "cuda:0/1");
  EXPECT_EQ(parts[0].sm_count, 96);
  EXPECT_EQ(parts[1].sm_count, 32);
  EXPECT_EQ(parts[0].fraction, 0.75);
  EXPECT_EQ(parts[1].fraction, 0.25);
  const Device gpu = find_device("cuda:0");
  EXPECT_EQ(gpu.sm_count, 132);
  EXPECT_EQ(gpu.part, -1);
  for (int k = 0; k < 2; ++k) {
    const Device& part = parts[static_cast<std::size_t>(k)];
    EXPECT_EQ(part.kind, DeviceKind::cuda);
    EXPECT_EQ(part.index, 0);
    EXPECT_EQ(part.part, k);
    EXPECT_EQ(part.memory_space, "cuda:0");
    EXPECT_EQ(part.cores, gpu.cores);
    EXPECT_EQ(find_device(part.name), part);
  }
  EXPECT_EQ(parts[1].device_class, "Fake GPU 0, 132 SMs, a part of 32");
  for (const Device& device : devices()) EXPECT_EQ(device.part, -1) << "whole devices only, or a GPU is used twice";
}

TEST_F(Partition, StreamsHaveTheSmsOfTheirPartAlone) {
  for (const std::vector<double>& fractions : {std::vector<double>{0.75, 0.25}, {0.25, 0.25, 0.5}, {0.5}, {1.0}}) {
    const std::vector<Device> parts = partition("cuda:0", fractions);
    std::set<int> taken;
    for (const Device& part : parts) {
      const auto device = open(part);
      const auto stream = device->make_stream();
      const std::vector<int> sms = sms_of(*stream);
      EXPECT_EQ(sms, sms_of(*device->make_stream())) << "all streams of a part have the same SMs";
      EXPECT_EQ(sms.size(), static_cast<std::size_t>(part.sm_count));
      for (const int sm : sms) EXPECT_TRUE(taken.insert(sm).second) << part.name << " shares SM " << sm;
    }
    EXPECT_EQ(sms_of(*open(find_device("cuda:0"))->make_stream()).size(), 132U) << "the GPU itself stays whole";
  }
}

TEST_F(Partition, GivesTheSameDevicesForTheSameSplit) {
  const std::vector<Device> parts = partition("cuda:0", {0.75, 0.25});
  const auto stream = open(parts[0])->make_stream();
  EXPECT_EQ(partition("cuda:0", {0.75, 0.25}), parts);
  EXPECT_EQ(partition("cuda:0", {0.74, 0.26}), parts) << "it comes to the same SMs";
  EXPECT_EQ(fake::leftovers().green_contexts, 2U);
  EXPECT_EQ(sms_of(*stream), sms_of(*open(partition("cuda:0", {0.75, 0.25})[0])->make_stream()));
}

TEST_F(Partition, PartsAreMemorySpacesOfTheirOwnIfTheyStandForGpus) {
  EXPECT_EQ(partition("cuda:0", {0.75, 0.25})[1].memory_space, "cuda:0");
  setenv("PACELINE_PARTS_AS_GPUS", "1", 1);
  const std::vector<Device> parts = partition("cuda:0", {0.75, 0.25});
  EXPECT_EQ(find_device("cuda:0/0").memory_space, "cuda:0/0");
  EXPECT_EQ(parts[1].memory_space, "cuda:0/1");
  EXPECT_TRUE(open(parts[0])->accesses(*open(parts[1])));
  setenv("PACELINE_PEER_ACCESS", "0", 1);
  EXPECT_EQ(open(parts[0])->link_to(*open(parts[1])), LinkKind::through_host);
  unsetenv("PACELINE_PARTS_AS_GPUS");
  EXPECT_TRUE(open(parts[0])->accesses(*open(parts[1]))) << "one memory needs no access to a peer";
  unsetenv("PACELINE_PEER_ACCESS");
  EXPECT_EQ(partition("cuda:0", {0.75, 0.25})[1].memory_space, "cuda:0");
}

TEST_F(Partition, AnotherSplitTakesThePlaceOfOneThatNothingUses) {
  const std::vector<Device> old = partition("cuda:0", {0.75, 0.25});
  const std::vector<Device> parts = partition("cuda:0", {0.25, 0.75});
  EXPECT_EQ(parts[0].sm_count, 32);
  EXPECT_EQ(fake::leftovers().green_contexts, 2U);
  const auto error = thrown_by<InvalidArgument>([&] { static_cast<void>(open(old[0])); });
  EXPECT_TRUE(says(error, "cuda:0/0 of 96 SMs is no more")) << error.what();
  EXPECT_TRUE(says(error, "split otherwise")) << error.what();
}

TEST_F(Partition, RefusesAnotherSplitWhileOneIsInUse) {
  const std::vector<Device> parts = partition("cuda:0", {0.75, 0.25});
  auto device = open(parts[1]);
  auto stream = device->make_stream();
  auto buffer = device->allocate(8, *stream);
  const auto refused = [&](const char* while_there_is) {
    const auto error = thrown_by<InvalidArgument>([] { static_cast<void>(partition("cuda:0", {0.5, 0.5})); });
    EXPECT_TRUE(says(error, "cuda:0/1 is still in use")) << while_there_is << ": " << error.what();
    EXPECT_TRUE(says(error, "96, 32 SMs")) << error.what();
    EXPECT_THROW(release_partitions("cuda:0"), InvalidArgument) << while_there_is;
    EXPECT_EQ(find_device("cuda:0/1"), parts[1]) << "nothing was changed";
  };
  refused("a device");
  device.reset();
  refused("a stream");
  stream.reset();
  refused("a buffer");
  buffer.reset();
  EXPECT_EQ(partition("cuda:0", {0.5, 0.5})[1].sm_count, 64);
}

TEST_F(Partition, ReleaseMakesTheGpuWholeAgain) {
  const std::vector<Device> parts = partition("cuda:0", {0.5, 0.5});
  release_partitions("cuda:0");
  release_partitions("cuda:0");
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
  EXPECT_THROW(static_cast<void>(find_device("cuda:0/0")), InvalidArgument);
  const auto error = thrown_by<InvalidArgument>([&] { static_cast<void>(open(parts[0])); });
  EXPECT_TRUE(says(error, "made whole")) << error.what();
}

TEST_F(Partition, ReleaseWaitsForWhatDroppedStreamsStillHadToDo) {
  const std::vector<Device> parts = partition("cuda:0", {0.5, 0.5});
  cudaStream_t const native = dropped_while_it_hangs(parts[1]);
  const auto release = [] { release_partitions("cuda:0", std::chrono::milliseconds(5)); };
  EXPECT_TRUE(says(thrown_by<Timeout>(release), "enqueued on cuda:0/1 does not come to its end"));
  EXPECT_EQ(find_device("cuda:0/1"), parts[1]) << "it stays";
  fake::go_on(native);
  EXPECT_NO_THROW(release_partitions("cuda:0", std::chrono::seconds(30)));
}

TEST_F(Partition, ReleaseHoldsUpNobodyElseWhileItWaits) {
  boot({.device_count = 2});
  const std::vector<Device> parts = partition("cuda:0", {0.5, 0.5});
  cudaStream_t const native = dropped_while_it_hangs(parts[1]);
  std::atomic<bool> over = false;
  std::jthread releasing([&] {
    EXPECT_NO_THROW(release_partitions("cuda:0", std::chrono::seconds(3)));
    over = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // by now it waits
  EXPECT_EQ(find_device("cuda:0/1"), parts[1]);
  EXPECT_EQ(partition("cuda:1", {0.5, 0.5}).size(), 2U);
  EXPECT_FALSE(over) << "they had to wait for it";
  fake::go_on(native);
  releasing.join();
  EXPECT_THROW(static_cast<void>(find_device("cuda:0/1")), InvalidArgument);
}

TEST_F(Partition, NamesOfPartsThatAreNotThereAreRefused) {
  const auto error = thrown_by<InvalidArgument>([] { static_cast<void>(find_device("cuda:0/1")); });
  EXPECT_TRUE(says(error, "partition(\"cuda:0\", ...) first")) << error.what();
  EXPECT_TRUE(says(error, "devices of this machine: cuda:0")) << error.what();
  static_cast<void>(partition("cuda:0", {0.5, 0.5}));
  for (const char* name : {"cuda:0/2", "cuda:0/", "cuda:0/01", "cuda:0/-1", "cuda:0/0/0", "cuda:0/1x", "cuda:1/0"}) {
    EXPECT_THROW(static_cast<void>(find_device(name)), InvalidArgument) << name;
  }
  EXPECT_TRUE(says(thrown_by<InvalidArgument>([] { static_cast<void>(find_device("cuda:0/2")); }),
                   "the parts of cuda:0 are called cuda:0/0 to cuda:0/1"));
}

TEST_F(Partition, RefusesFractionsThatMakeNoSense) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const auto refused = [](const std::vector<double>& fractions, const std::string& why) {
    const auto error = thrown_by<InvalidArgument>([&] { static_cast<void>(partition("cuda:0", fractions)); });
    EXPECT_TRUE(says(error, why)) << error.what();
  };
  refused({}, "no fractions");
  for (const double fraction : {0.0, -0.5, nan, infinity}) refused({0.5, fraction}, "each must be more than 0");
  refused({0.7, 0.4}, "sum to 1.1");
  refused({1.01}, "sum to 1.01");
  EXPECT_TRUE(says(thrown_by<InvalidArgument>([] { static_cast<void>(partition("cuda:0", {0.9, 0.05})); }),
                   "the smallest possible fraction is 0.0625"));
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST_F(Partition, RefusesWhatHasNoParts) {
  EXPECT_THROW(static_cast<void>(partition("host:0", {0.5, 0.5})), Unavailable);
  EXPECT_NO_THROW(release_partitions("host:0"));
  static_cast<void>(partition("cuda:0", {0.5, 0.5}));
  EXPECT_TRUE(says(thrown_by<InvalidArgument>([] { static_cast<void>(partition("cuda:0/0", {0.5, 0.5})); }),
                   "Name the GPU itself: cuda:0"));
  EXPECT_THROW(release_partitions("cuda:0/0"), InvalidArgument);
  EXPECT_THROW(static_cast<void>(partition("cuda:7", {0.5})), InvalidArgument);
  boot({.multiprocessors = 4});  // fewer than a group has
  EXPECT_TRUE(
      says(thrown_by<Unavailable>([] { static_cast<void>(partition("cuda:0", {1.0})); }), "no groups of its 4"));
}

TEST_F(Partition, NeedsADriverThatHasGreenContexts) {
  for (const int version : {12020, 12040}) {
    boot({.driver_version = version});
    const auto error = thrown_by<Unavailable>([] { static_cast<void>(partition("cuda:0", {0.5, 0.5})); });
    EXPECT_TRUE(says(error, "cuda:0 cannot be split")) << error.what();
    EXPECT_TRUE(says(error, "CUDA 12.5 or newer")) << error.what();
    EXPECT_TRUE(says(error, version == 12020 ? "is for CUDA 12.2" : "is for CUDA 12.4")) << error.what();
    EXPECT_NO_THROW(static_cast<void>(open(find_device("cuda:0"))->make_stream())) << "all else goes on";
  }
  boot({.driver_version = 12050});
  EXPECT_EQ(partition("cuda:0", {0.5, 0.5}).size(), 2U);
}

TEST_F(Partition, LeavesNothingBehindWhenItFails) {
  fake::fail_allocation(1);
  EXPECT_THROW(static_cast<void>(partition("cuda:0", {0.5, 0.5})), OutOfMemory);
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
  const std::vector<Device> parts = partition("cuda:0", {0.5, 0.5});
  EXPECT_EQ(parts.size(), 2U);
  const auto device = open(parts[0]);
  const auto stream = device->make_stream();
  fake::poison(0, cudaErrorIllegalAddress);
  EXPECT_THROW(static_cast<void>(device->make_stream()), DeviceLost);
}

TEST_F(Partition, WorkersHaveTheirGpuCurrent) {
  class AskTask final : public GroupTask {
   public:
    void run(DeviceId device) noexcept override { EXPECT_EQ(cudaGetDevice(&current[device.number()]), cudaSuccess); }
    int current[2] = {-1, -1};
  };
  boot({.device_count = 2});
  DeviceGroup group(partition("cuda:1", {0.5, 0.5}));
  const auto task = std::make_shared<AskTask>();
  group.run(task);
  EXPECT_EQ(task->current[0], 1);
  EXPECT_EQ(task->current[1], 1);
}

TEST_F(Partition, CanBeAskedForByManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> refused{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t, &refused] {
      for (int round = 0; round < 50; ++round) {
        try {
          const std::vector<Device> parts = partition("cuda:0", {t % 2 == 0 ? 0.25 : 0.5, 0.5});
          const auto device = open(parts[1]);
          EXPECT_EQ(sms_of(*device->make_stream()).size(), 64U);
        } catch (const InvalidArgument&) {  // the other split is in use
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(refused.load(), 200);
}

}  // namespace
}  // namespace paceline

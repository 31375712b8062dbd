// SPDX-License-Identifier: Apache-2.0
//
// Copies between GPUs on other streams than the one that is asked: through the host, and pushed by the source.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>

#include "cuda_device.hpp"
#include "fake_cuda.hpp"
#include "gpu_arrays.hpp"
#include "helpers.hpp"
#include "host_path.hpp"
#include "orders.hpp"
#include "push_path.hpp"
#include "twins.hpp"

namespace paceline::cuda {
namespace {

constexpr int kNoPeerAccess = 1;  // GPUs on a switch

void boot_gpus(const fake::Settings& settings) {
  fake::boot(settings);
  fake::set_twins();
}

/// Two streams of either GPU copy at once, in both directions, in pieces that fill the chunks several times.
TEST(HostPath, CopiesInTheOrderOfTheStreamsAndHoldsNoThread) {
  constexpr std::size_t chunk = 64;
  constexpr std::size_t bytes = 5 * chunk + 12;
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot_gpus({.seed = seed, .device_count = 2, .switch_size = kNoPeerAccess});
    const auto device = open_device(0);
    const auto peer = open_device(1);
    HostPath path(0, chunk);
    for (AsyncDevice* const caller : {device.get(), peer.get()}) {
      const auto stream = caller->make_stream();
      const auto begun = caller->make_event(false);
      const auto ready = device->make_event(false);
      const auto made = peer->make_event(false);
      const auto done = caller->make_event(false);
      const auto source_stream = device->make_stream();
      const auto target_stream = peer->make_stream();
      const auto from = device->allocate(bytes, *source_stream);
      const auto to = peer->allocate(bytes, *target_stream);
      const auto result = caller->allocate_pinned(bytes);
      std::vector<unsigned char> values(bytes);
      std::iota(values.begin(), values.end(), static_cast<unsigned char>(seed));
      source_stream->copy(from->data(), values.data(), bytes);
      source_stream->record(*ready);
      target_stream->record(*made);
      stream->wait(*ready);
      stream->wait(*made);
      const HostPath::Receiver receiver{1, stream.get(), begun.get(), to->data()};
      path.copy({&receiver, 1}, from->data(), bytes);
      path.copy({&receiver, 1}, from->data(), bytes - 1);
      stream->record(*done);
      source_stream->wait(*done);  // the memory's next use comes after the copies
      target_stream->wait(*done);
      source_stream->zero(from->data(), bytes);
      target_stream->copy(result->data(), to->data(), bytes);
      target_stream->record(*made);
      source_stream->record(*ready);
      wait_for(*made);
      wait_for(*ready);
      ASSERT_EQ(std::memcmp(result->data(), values.data(), bytes), 0);
    }
    ASSERT_EQ(fake::synchronize_calls(), 0);
  });
}

/// Two GPUs get the same memory at once, in chunks that are used several times, and then one of them alone.
TEST(HostPath, LeavesTheSourceOnceForSeveralGpus) {
  constexpr std::size_t chunk = 64;
  constexpr std::size_t bytes = 5 * chunk + 12;
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot_gpus({.seed = seed, .device_count = 3, .switch_size = kNoPeerAccess});
    std::vector<std::unique_ptr<AsyncDevice>> gpus;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Event>> events;
    std::vector<std::unique_ptr<Buffer>> memory, results;
    for (int k = 0; k < 3; ++k) {
      gpus.push_back(open_device(k));
      streams.push_back(gpus.back()->make_stream());
      events.push_back(gpus.back()->make_event(false));
      memory.push_back(gpus.back()->allocate(bytes, *streams.back()));
      results.push_back(gpus.back()->allocate_pinned(bytes));
    }
    HostPath path(0, chunk);
    for (int round = 0; round < 3; ++round) {
      std::vector<unsigned char> values(bytes);
      std::iota(values.begin(), values.end(), static_cast<unsigned char>(seed + static_cast<unsigned>(round)));
      streams[0]->copy(memory[0]->data(), values.data(), bytes);
      streams[0]->record(*events[0]);
      std::vector<HostPath::Receiver> receivers;
      for (int k = 1; k < (round == 1 ? 2 : 3); ++k) {
        streams[k]->wait(*events[0]);
        receivers.push_back({k, streams[k].get(), events[k].get(), memory[k]->data()});
      }
      const fake::HostCopies before = fake::host_copies();
      path.copy(receivers, memory[0]->data(), bytes);
      const int uploads = 6 * static_cast<int>(receivers.size());
      ASSERT_EQ(fake::host_copies() - before, (fake::HostCopies{6, uploads}));
      for (const HostPath::Receiver& one : receivers) {
        one.stream->copy(results[one.target]->data(), one.to, bytes);
        one.stream->record(*one.begun);
        streams[0]->wait(*one.begun);  // the memory's next use comes after the copies
      }
      streams[0]->zero(memory[0]->data(), bytes);
      for (const HostPath::Receiver& one : receivers) {
        wait_for(*one.begun);
        ASSERT_EQ(std::memcmp(results[one.target]->data(), values.data(), bytes), 0);
      }
    }
    streams[0]->record(*events[0]);
    wait_for(*events[0]);
    ASSERT_EQ(fake::synchronize_calls(), 0);
  });
}

/// Copies of two chunks or more to two GPUs, of which something fails. They need not arrive, but who waits for the
/// streams waits for all that was enqueued.
class FailingHostPath : public ::testing::Test {
 protected:
  static constexpr std::size_t kChunk = 64;
  static constexpr std::size_t kBytes = 3 * kChunk;

  void boot(std::uint64_t seed) {
    boot_gpus({.seed = seed, .device_count = 3, .switch_size = kNoPeerAccess});
    for (int k = 0; k < 3; ++k) {
      gpus.push_back(open_device(k));
      streams.push_back(gpus.back()->make_stream());
      events.push_back(gpus.back()->make_event(false));
      memory.push_back(gpus.back()->allocate(kBytes, *streams.back()));
    }
    streams[0]->zero(memory[0]->data(), kBytes);
    streams[0]->record(*events[0]);
    for (int k = 1; k < 3; ++k) {
      streams[k]->wait(*events[0]);
      receivers.push_back({k, streams[k].get(), events[k].get(), memory[k]->data()});
    }
    path.emplace(0, kChunk);
  }
  void await_the_streams() {
    for (int k = 0; k < 3; ++k) {
      streams[k]->record(*events[k]);
      wait_for(*events[k]);
    }
  }
  void close() {
    path.reset();
    receivers.clear();
    memory.clear();
    events.clear();
    streams.clear();
    gpus.clear();
    EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  }
  void clear() {
    close();
    EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
  }
  /// The streams wait for a copy that fails by what `arm` does, and the next one works.
  template <class Arm>
  void expect_waits(const Arm& arm) {
    for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
      boot(seed);
      arm(seed);
      EXPECT_THROW(path->copy(receivers, memory[0]->data(), kBytes), Error) << "seed " << seed;
      await_the_streams();
      ASSERT_EQ(fake::leftovers().queued, 0U) << "seed " << seed;
      path->copy(receivers, memory[0]->data(), kBytes);
      await_the_streams();
      clear();
    }
  }

  std::vector<std::unique_ptr<AsyncDevice>> gpus;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<std::unique_ptr<Buffer>> memory;
  std::vector<HostPath::Receiver> receivers;
  std::optional<HostPath> path;
};

TEST_F(FailingHostPath, EnqueuesNothingWithoutMemoryForBothChunks) {
  for (const int allocation : {0, 1}) {
    boot(1);
    fake::fail_allocation(allocation);
    EXPECT_THROW(path->copy(receivers, memory[0]->data(), kBytes), OutOfMemory);
    EXPECT_EQ(fake::host_copies(), fake::HostCopies{}) << "allocation " << allocation;
    path->copy(receivers, memory[0]->data(), kBytes);
    EXPECT_EQ(fake::host_copies(), (fake::HostCopies{3, 6}));
    await_the_streams();
    clear();
  }
}

TEST_F(FailingHostPath, LetsTheStreamsWaitForWhatAFailedCopyHasEnqueued) {
  expect_waits([](std::uint64_t seed) {
    fake::set_before_copy([left = std::make_shared<std::atomic<int>>(static_cast<int>(seed % 9))] {
      return (*left)-- == 0 ? cudaErrorUnknown : cudaSuccess;
    });
  });
}

TEST_F(FailingHostPath, LetsTheStreamsWaitWhicheverEventFails) {
  // After what both receivers have begun with: each fill, the wait and the end of each upload, the waits for uploads
  // before a chunk is filled again, and both receivers' waits.
  expect_waits([](std::uint64_t seed) { fake::fail_event(4 + static_cast<int>(seed % (3 * 5 + 2 + 2))); });
}

TEST_F(FailingHostPath, LetsTheOtherStreamsWaitWhereOneGpuIsLost) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed);
    fake::set_before_copy([left = std::make_shared<std::atomic<int>>(static_cast<int>(seed % 9))] {
      if ((*left)-- == 0) fake::poison(1, cudaErrorIllegalAddress);
      return cudaSuccess;
    });
    EXPECT_THROW(path->copy(receivers, memory[0]->data(), kBytes), DeviceLost) << "seed " << seed;
    streams[2]->zero(memory[2]->data(), kBytes);  // comes after all that writes to it
    streams[2]->record(*events[2]);
    streams[0]->wait(*events[2]);
    streams[0]->zero(memory[0]->data(), kBytes);  // and this after all that reads it
    streams[0]->record(*events[0]);
    wait_for(*events[0]);
    close();
  }
}

/// A stream of the target asks for copies, and one of a third GPU, in any order of the machine.
TEST(PushPath, CopiesInTheOrderOfTheStreamsAndHoldsNoThread) {
  constexpr std::size_t bytes = 100;
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot_gpus({.seed = seed, .device_count = 3, .switch_size = 3});
    const auto source = open_device(0);
    const auto target = open_device(1);
    const auto third = open_device(2);
    EXPECT_FALSE(source->push_to(*target, true));
    const auto writer = source->make_stream();
    const auto from = source->allocate(bytes, *writer);
    const auto written = source->make_event(false);
    const auto made = target->make_event(false);
    const auto reader = target->make_stream();
    const auto to = target->allocate(bytes, *reader);
    std::vector<unsigned char> values(bytes);
    std::iota(values.begin(), values.end(), static_cast<unsigned char>(seed));
    for (AsyncDevice* const caller : {target.get(), third.get()}) {
      const auto stream = caller->make_stream();
      const auto copied = caller->make_event(false);
      const auto result = target->allocate_pinned(bytes);
      reader->zero(to->data(), bytes);
      reader->record(*made);
      writer->copy(from->data(), values.data(), bytes);
      writer->record(*written);
      stream->wait(*written);
      stream->wait(*made);
      stream->copy(to->data(), from->data(), bytes);
      stream->copy(to->data(), MemoryPlace{1}, from->data(), MemoryPlace{0}, bytes);
      stream->record(*copied);
      writer->wait(*copied);  // the memory's next use comes after the copies
      reader->wait(*copied);
      writer->zero(from->data(), bytes);
      reader->copy(result->data(), to->data(), bytes);
      reader->record(*made);
      writer->record(*written);
      wait_for(*made);
      wait_for(*written);
      ASSERT_EQ(std::memcmp(result->data(), values.data(), bytes), 0);
    }
    EXPECT_TRUE(source->push_to(*target, false));
    ASSERT_EQ(fake::synchronize_calls(), 0);
  });
}

TEST(PushPath, LetsTheStreamWaitWhicheverEventFails) {
  constexpr std::size_t bytes = 100;
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot_gpus({.seed = seed, .device_count = 2, .switch_size = 2});
    const auto source = open_device(0), target = open_device(1);
    const auto writer = source->make_stream(), stream = target->make_stream();
    const auto from = source->allocate(bytes, *writer), to = target->allocate(bytes, *stream);
    const auto written = source->make_event(false), begun = target->make_event(false);
    writer->zero(from->data(), bytes);
    writer->record(*written);
    stream->wait(*written);
    PushPath path(0, 1);
    fake::fail_event(static_cast<int>(seed % 4));
    EXPECT_THROW(path.copy(*stream, *begun, to->data(), from->data(), bytes), Error);
    stream->record(*begun);
    wait_for(*begun);
    ASSERT_EQ(fake::leftovers().queued, 0U);
    path.copy(*stream, *begun, to->data(), from->data(), bytes);
    stream->record(*begun);
    wait_for(*begun);
  });
}

TEST(CopyPaths, ServeSeveralThreadsAtOnce) {
  constexpr std::size_t bytes = 300;
  for (const int switch_size : {kNoPeerAccess, 3}) {
    boot_gpus({.device_count = 3, .switch_size = switch_size});
    {
      const auto source = open_device(0), first = open_device(1), second = open_device(2);
      for (const auto* const target : {first.get(), second.get()}) source->push_to(*target, true);
      const auto writer = source->make_stream();
      const auto from = source->allocate(bytes, *writer);
      const auto written = source->make_event(false);
      const std::vector<unsigned char> values(bytes, 7);
      writer->copy(from->data(), values.data(), bytes);
      writer->record(*written);
      std::vector<std::jthread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
          const auto one = first->make_stream(), other = second->make_stream();
          const auto to_one = first->allocate(bytes, *one), to_other = second->allocate(bytes, *other);
          const auto result = second->allocate_pinned(bytes);
          const auto done = first->make_event(false), read = second->make_event(false);
          for (Stream* const stream : {one.get(), other.get()}) stream->wait(*written);
          for (int copy = 0; copy < 20; ++copy) {
            const Receiver receivers[] = {{one.get(), to_one->data()}, {other.get(), to_other->data()}};
            source->copy_to_all(receivers, from->data(), bytes);
            one->copy(to_one->data(), from->data(), bytes);
          }
          other->copy(result->data(), to_other->data(), bytes);
          other->record(*read);
          one->record(*done);
          wait_for(*read);
          wait_for(*done);
          EXPECT_EQ(std::memcmp(result->data(), values.data(), bytes), 0);
        });
      }
    }
    EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  }
}

TEST(HostPath, CarriesWhatOneGpuSendsToAllOnce) {
  boot_gpus({.device_count = 4, .switch_size = kNoPeerAccess});
  set_user_twins();
  {
    const DeviceGroup group = group_of({"cuda:0", "cuda:1", "cuda:2", "cuda:3"});
    Communicator communicator(group, {.transport = Transport::copies});
    constexpr std::size_t kCount = 5;
    GpuArrays arrays(group, kCount);
    const std::vector<float> ones(kCount, 1.0F);
    for (std::size_t d = 0; d < group.size(); ++d) arrays.fill(d, ones);
    const fake::HostCopies before = fake::host_copies();
    communicator.broadcast(arrays.views(), 2);
    const fake::HostCopies sent = fake::host_copies();
    EXPECT_EQ(sent - before, (fake::HostCopies{1, 3}));
    communicator.all_reduce(arrays.views(), ReduceOp::sum);
    EXPECT_EQ(fake::host_copies() - sent, (fake::HostCopies{3 + 1, 3 + 3})) << "each other's, and the sum";
    std::vector<float> read(kCount);
    arrays.read(3, read);
    arrays.wait();
    EXPECT_EQ(read.back(), 4.0F);
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

}  // namespace
}  // namespace paceline::cuda

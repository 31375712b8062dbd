// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/host_topology.hpp>
#include <paceline/runtime/partition.hpp>

#include "../cpp/comm/reference.hpp"
#include "cuda_backend.hpp"
#include "device_guard.hpp"
#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "reduce.hpp"
#include "runtime/thread_place.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

using internal::PreferredNode;

void boot_machine(const fake::Settings& settings = {}) {
  fake::boot(settings);
  fake::set_twins();
}

std::unique_ptr<AsyncDevice> open(int ordinal = 0) {
  const CudaBackend backend;
  return backend.open(backend.find("cuda:" + std::to_string(ordinal)));
}

CUresult current_context(CUcontext* context) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, 12000, cudaEnableDefault, &found), cudaSuccess);
  return reinterpret_cast<decltype(&cuCtxGetCurrent)>(entry)(context);
}

TEST(CudaBackend, ListsTheGpusBeforeTheHost) {
  boot_machine({.device_count = 2});
  const std::vector<Device> all = devices();
  ASSERT_GE(all.size(), 3U);
  EXPECT_EQ(all[0].name, "cuda:0");
  EXPECT_EQ(all[1].name, "cuda:1");
  EXPECT_EQ(all[1].kind, DeviceKind::cuda);
  EXPECT_EQ(all[1].memory_space, "cuda:1");
  EXPECT_EQ(all[1].device_class, "Fake GPU 1, 132 SMs");
  EXPECT_EQ(all[2].name, "host:0");
  EXPECT_EQ(find_device("cuda:1"), all[1]);
  EXPECT_THROW(static_cast<void>(find_device("cuda:2")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(find_device("cuda:01")), InvalidArgument);
}

TEST(CudaBackend, SaysWhyThereIsNone) {
  const auto why = [](const fake::Settings& settings) {
    boot_machine(settings);
    EXPECT_TRUE(CudaBackend().devices().empty());
    EXPECT_EQ(devices().front().name, "host:0");
    return CudaBackend().why_none();
  };
  EXPECT_EQ(why({.driver_present = false}), "no NVIDIA driver is loaded");
  EXPECT_TRUE(says(why({.device_count = 0}), "shows no GPU"));
  boot_machine({.driver_present = false});
  const auto error = thrown_by<InvalidArgument>([&] { static_cast<void>(find_device("cuda:0")); });
  EXPECT_TRUE(says(error, "no NVIDIA driver is loaded"));
}

TEST(CudaDevice, GivesBackAllItTook) {
  boot_machine();
  {
    const auto device = open();
    const auto stream = device->make_stream();
    const auto event = device->make_event(true);
    const auto buffer = device->allocate(1000, *stream);
    const auto pinned = device->allocate_pinned(1000);
    const auto nothing = device->allocate(0, *stream);
    EXPECT_EQ(nothing->data(), nullptr);
    stream->zero(buffer->data(), 1000);
    stream->copy(pinned->data(), buffer->data(), 1000);
    stream->record(*event);
    wait_for(*event);
    EXPECT_EQ(static_cast<const char*>(pinned->data())[999], 0);
  }
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
  EXPECT_TRUE(fake::problems().empty());
  EXPECT_EQ(fake::synchronize_calls(), 0);
}

TEST(CudaDevice, GivesUnusedMemoryBackOnRequest) {
  boot_machine({.device_count = 1});
  const auto device = open();
  const auto stream = device->make_stream();
  const auto event = device->make_event(false);
  const auto used = device->allocate(1000, *stream);
  device->allocate(5000, *stream).reset();
  stream->record(*event);
  wait_for(*event);
  EXPECT_GE(fake::unused_pool_bytes(), 5000U) << "the pool keeps what is freed";
  device->release_memory();
  EXPECT_EQ(fake::unused_pool_bytes(), 0U);
  stream->zero(used->data(), 1000);
}

TEST(CudaDevice, UsesStreamsAgainThatHaveNothingLeftToDo) {
  boot_machine({.device_count = 2});
  const auto device = open();
  auto first = device->make_stream();
  NativeStream const handle = first->native();
  first.reset();
  EXPECT_NE(open(1)->make_stream()->native(), handle) << "of another GPU";
  first = device->make_stream();
  EXPECT_EQ(first->native(), handle);

  const auto buffer = device->allocate(64, *first);
  fake::hang(handle);
  first->zero(buffer->data(), 64);
  first.reset();
  auto second = device->make_stream();
  EXPECT_NE(second->native(), handle) << "it still has work to do";
  fake::go_on(handle);
}

TEST(CudaDevice, MayBeAskedForAnEventWhileAnotherThreadRecordsIt) {
  boot_machine();
  const auto device = open();
  const auto stream = device->make_stream();
  const auto event = device->make_event(false);
  std::jthread asking([&] {
    for (bool done = false; !done;) {
      try {
        done = event->done();
      } catch (const Error&) {  // it is not recorded yet
      }
    }
  });
  stream->record(*event);
}

TEST(CudaDevice, LeavesTheCallersDeviceAlone) {
  boot_machine({.device_count = 2});
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  {
    const auto device = open(1);
    const auto stream = device->make_stream();
    const auto event = device->make_event(false);
    stream->record(*event);
    wait_for(*event);
  }
  int current = -1;
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);
}

TEST(CudaDevice, LeavesAThreadWithoutAContextAsItWas) {
  boot_machine({.device_count = 2});
  std::thread([] {
    {
      const auto device = open(1);
      const auto stream = device->make_stream();
      const auto event = device->make_event(true);
      const auto buffer = device->allocate(64, *stream);
      const auto pinned = device->allocate_pinned(64);
      stream->zero(buffer->data(), 64);
      stream->copy(pinned->data(), buffer->data(), 64);
      stream->record(*event);
      wait_for(*event);
    }
    CUcontext current = nullptr;
    EXPECT_EQ(current_context(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, nullptr);
  }).join();
  EXPECT_TRUE(fake::problems().empty()) << fake::problems().front();
}

TEST(CudaDevice, RefusesToWaitForWhatWasNeverRecorded) {
  boot_machine();
  const auto device = open();
  const auto stream = device->make_stream();
  const auto event = device->make_event(false);
  EXPECT_THROW(stream->wait(*event), Error);
  EXPECT_THROW(static_cast<void>(event->done()), Error);
}

TEST(CudaDevice, TranslatesErrors) {
  boot_machine({.memory_bytes = 1 << 20});
  const auto device = open();
  const auto stream = device->make_stream();
  const auto event = device->make_event(false);
  const auto error = thrown_by<OutOfMemory>([&] { static_cast<void>(device->allocate(2 << 20, *stream)); });
  EXPECT_EQ(error.device(), "cuda:0");
  fake::fail_allocation(0);
  EXPECT_THROW(static_cast<void>(device->allocate_pinned(8)), OutOfMemory);
  stream->record(*event);
  fake::poison(0, cudaErrorIllegalAddress);
  const auto lost = thrown_by<DeviceLost>([&] { static_cast<void>(event->done()); });
  EXPECT_EQ(lost.device(), "cuda:0");
  EXPECT_TRUE(says(lost, "cudaErrorIllegalAddress"));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error of ours must not be found by somebody else's check";
  EXPECT_THROW(static_cast<void>(device->make_stream()), DeviceLost);
}

TEST(CudaDevice, PinsMemoryOnTheGpusNumaNode) {
  boot_machine();
  const auto device = open();
  const int before = PreferredNode::current();
  {
    const PreferredNode probe(0);
    if (PreferredNode::current() != 0) GTEST_SKIP() << "this system does not let a thread choose its memory's node";
  }
  const auto buffer = device->allocate_pinned(1 << 20);
  EXPECT_EQ(fake::node_of_pinned_memory(), 0);
  EXPECT_EQ(PreferredNode::current(), before) << "the caller's own memory comes from where it came before";
}

/// A collective's kernels wait for each other. A kernel that is loaded in the middle of their launches waits for them.
TEST(CudaDevice, LaunchesItsKernelsWithoutLoadingThem) {
  boot_machine({.device_count = 2});
  for (const int ordinal : {0, 1}) {
    const auto device = open(ordinal);
    const auto stream = device->make_stream();
    const auto waiting = device->make_stream();
    const auto buffer = device->allocate(64, *stream);
    const void* const inputs[] = {buffer->data()};
    fake::hang(waiting->native());
    const auto event = device->make_event(false);
    waiting->record(*event);
    for (const DType dtype : reference::kDTypes) stream->reduce({inputs, buffer->data(), 4, dtype, 1.0});
    for (const DType half : {DType::float16, DType::bfloat16}) {
      stream->convert(static_cast<char*>(buffer->data()) + 32, half, buffer->data(), DType::float32, 4);
      stream->convert(static_cast<char*>(buffer->data()) + 32, DType::float32, buffer->data(), half, 4);
    }
    EXPECT_EQ(fake::problems(), std::vector<std::string>{});
    fake::go_on(waiting->native());
  }
}

/// The largest grid that runs at once, for a GPU and for a part of it. The fake runs four blocks per SM.
TEST(CudaDevice, ReducesWithAsManyBlocksAsRunAtOnce) {
  boot_machine({.multiprocessors = 16});
  std::vector<unsigned int> grids;
  fake::twin(&cuda::paceline_reduce_float32,
             [&](const fake::Launch& launch, const cuda::ReductionArguments&) { grids.push_back(launch.grid.x); });
  const auto reduce = [](AsyncDevice& device, std::size_t count) {
    const auto stream = device.make_stream();
    const auto event = device.make_event(false);
    const auto buffer = device.allocate(count * sizeof(float), *stream);
    const void* const inputs[] = {buffer->data()};
    stream->reduce({inputs, buffer->data(), count, DType::float32, 1.0});
    stream->record(*event);
    wait_for(*event);
  };
  reduce(*open(), 1 << 20);
  reduce(*open(), 1 << 12);
  const std::vector<Device> parts = partition("cuda:0", std::vector<double>{0.5, 0.5});
  reduce(*CudaBackend().open(parts[0]), 1 << 20);
  release_partitions("cuda:0");
  EXPECT_EQ(grids, (std::vector<unsigned int>{64, 5, 32}));
}

TEST(CudaDevice, HasOneWorkerWhateverCoresItsGroupsWant) {
  boot_machine();
  Device device = find_device("cuda:0");
  const auto worker_of = [](DeviceGroup& group) {
    return group.async([](const Device&) { return std::this_thread::get_id(); }).get();
  };
  DeviceGroup first({device});
  device.cores = {affinity_mask().front()};
  DeviceGroup second({device});
  EXPECT_EQ(worker_of(first), worker_of(second)) << "steps of both would not take turns";
  device.name = "cuda:0/1";
  DeviceGroup part({device});
  EXPECT_NE(worker_of(first), worker_of(part));
}

TEST(CudaDevice, ConvertsBetweenFloat32AndHalfTypes) {
  boot_machine();
  const auto device = open();
  const auto stream = device->make_stream();
  const auto event = device->make_event(false);
  const std::vector<float> values{1.0F, 1.0F + 1.0F / 512.0F, -3.1415927F, 70000.0F, 1e-9F};
  const std::size_t count = values.size();
  const auto there = device->allocate(64, *stream);
  const auto half = device->allocate(64, *stream);
  const auto result = device->allocate_pinned(64);
  const auto round_trip = [&](DType type) {
    stream->copy(there->data(), values.data(), count * sizeof(float));
    stream->convert(half->data(), type, there->data(), DType::float32, count);
    stream->convert(there->data(), DType::float32, half->data(), type, count);
    stream->copy(result->data(), there->data(), count * sizeof(float));
    stream->record(*event);
    wait_for(*event);
    const auto* const begin = static_cast<const float*>(result->data());
    return std::vector<float>(begin, begin + count);
  };
  EXPECT_EQ(round_trip(DType::bfloat16), (std::vector<float>{1.0F, 1.0F, -3.140625F, 70144.0F, 0x1.12p-30F}));
  const float infinite = std::numeric_limits<float>::infinity();
  EXPECT_EQ(round_trip(DType::float16), (std::vector<float>{1.0F, 1.0F + 1.0F / 512.0F, -3.140625F, infinite, 0.0F}));
  EXPECT_TRUE(fake::problems().empty());
  const auto refused = thrown_by<InvalidArgument>(
      [&] { stream->convert(half->data(), DType::int32, there->data(), DType::float32, count); });
  EXPECT_TRUE(says(refused, "from float32 to int32"));
  const void* const inputs[] = {there->data()};
  EXPECT_THROW(stream->reduce({{}, there->data(), 1, DType::float32, 1.0}), InvalidArgument);
  EXPECT_THROW(stream->reduce({inputs, there->data(), 1, static_cast<DType>(9), 1.0}), InvalidArgument);
}

}  // namespace
}  // namespace paceline

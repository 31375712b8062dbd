// SPDX-License-Identifier: Apache-2.0
//
// GPUs that access each other's memory, and GPUs that cannot.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/backend.hpp>

#include "cuda_device.hpp"
#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "twins.hpp"

namespace paceline::cuda {
namespace {

constexpr int kNoPeers = 1;  // GPUs on a switch
constexpr std::size_t kCount = 5;

void boot_machine(const fake::Settings& settings) {
  fake::boot(settings);
  fake::set_twins();
}

/// Memory that the program has allocated on this GPU, with the numbers from `first` on.
class OrdinaryMemory {
 public:
  OrdinaryMemory(int device, float first) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&data, kCount * sizeof(float)), cudaSuccess);
    std::iota(static_cast<float*>(data), static_cast<float*>(data) + kCount, first);
  }
  ~OrdinaryMemory() { EXPECT_EQ(cudaFree(data), cudaSuccess); }
  OrdinaryMemory(const OrdinaryMemory&) = delete;
  OrdinaryMemory& operator=(const OrdinaryMemory&) = delete;

  void* data = nullptr;
};

/// The sum of both, by a kernel of this device.
float last_sum(AsyncDevice& device, const void* one, const void* other) {
  const auto stream = device.make_stream();
  const auto event = device.make_event(false);
  const auto sum = device.allocate(kCount * sizeof(float), *stream);
  const auto result = device.allocate_pinned(kCount * sizeof(float));
  const void* const inputs[] = {one, other};
  stream->reduce({inputs, sum->data(), kCount, DType::float32, 1.0});
  stream->copy(result->data(), sum->data(), kCount * sizeof(float));
  stream->record(*event);
  wait_for(*event);
  return static_cast<const float*>(result->data())[kCount - 1];
}

TEST(PeerAccess, IsNeededByKernelsAndBreaksTheDeviceWhereItLacks) {
  boot_machine({.device_count = 2, .switch_size = kNoPeers});
  const OrdinaryMemory here(0, 1.0F);
  const OrdinaryMemory there(1, 10.0F);
  const auto device = open_device(0);
  const auto peer = open_device(1);
  EXPECT_FALSE(device->accesses(*peer));
  const auto lost = thrown_by<DeviceLost>([&] { static_cast<void>(last_sum(*device, here.data, there.data)); });
  EXPECT_TRUE(says(lost, "cudaErrorIllegalAddress")) << lost.what();
  EXPECT_THROW(static_cast<void>(device->make_stream()), DeviceLost) << "for good";
}

TEST(PeerAccess, IsNotNeededByCopiesWhichTheDriverThenStages) {
  for (const int switch_size : {kNoPeers, 2}) {
    boot_machine({.device_count = 2, .switch_size = switch_size});
    const OrdinaryMemory here(0, 1.0F);
    const OrdinaryMemory there(1, 10.0F);
    const auto device = open_device(0);
    const auto peer = open_device(1);
    const auto stream = device->make_stream();
    const auto event = device->make_event(false);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaMemcpyPeerAsync(here.data, 0, there.data, 1, kCount * sizeof(float), stream->native()), cudaSuccess);
    stream->record(*event);
    wait_for(*event);
    EXPECT_EQ(static_cast<const float*>(here.data)[kCount - 1], 14.0F);
    EXPECT_EQ(fake::driver_staged_copies(), switch_size == kNoPeers ? 1 : 0);
  }
}

TEST(PeerAccess, IsEnabledBothWaysForMemoryOfTheProgram) {
  boot_machine({.device_count = 2});
  const OrdinaryMemory here(0, 1.0F);
  const OrdinaryMemory there(1, 10.0F);
  const auto device = open_device(0);
  const auto peer = open_device(1);
  EXPECT_TRUE(device->accesses(*peer));
  EXPECT_TRUE(device->accesses(*device));
  EXPECT_EQ(last_sum(*device, here.data, there.data), 5.0F + 14.0F);
  EXPECT_EQ(last_sum(*peer, here.data, there.data), 5.0F + 14.0F);
  EXPECT_TRUE(fake::problems().empty());
}

TEST(PeerAccess, CoversOurOwnPools) {
  boot_machine({.device_count = 2});
  const auto device = open_device(0);
  const auto peer = open_device(1);
  const auto stream = peer->make_stream();
  const auto event = peer->make_event(false);
  const auto memory = peer->allocate(kCount * sizeof(float), *stream);
  stream->zero(memory->data(), kCount * sizeof(float));
  stream->record(*event);
  wait_for(*event);
  EXPECT_EQ(last_sum(*device, memory->data(), memory->data()), 0.0F);
}

TEST(PeerAccess, MayHaveBeenEnabledBySomebodyElse) {
  boot_machine({.device_count = 2});
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaSuccess);
  const auto device = open_device(0);
  const auto peer = open_device(1);
  EXPECT_TRUE(device->accesses(*peer));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error of ours must not be found by somebody else's check";
}

TEST(PeerAccess, LeavesALostGpuOut) {
  boot_machine({.device_count = 2});
  const auto lost = open_device(0);
  fake::poison(0, cudaErrorECCUncorrectable);
  const auto device = open_device(1);
  EXPECT_FALSE(device->accesses(*lost));
  EXPECT_NO_THROW(static_cast<void>(device->make_stream()));
}

/// What cuda:1 gets of memory of cuda:0's pool.
float copied(AsyncDevice& device, AsyncDevice& peer) {
  const OrdinaryMemory here(0, 10.0F);
  const OrdinaryMemory there(1, 0.0F);
  const auto source = device.make_stream();
  const auto stream = peer.make_stream();
  const auto written = device.make_event(false);
  const auto event = peer.make_event(false);
  const auto pooled = device.allocate(kCount * sizeof(float), *source);
  source->copy(pooled->data(), here.data, kCount * sizeof(float));
  source->record(*written);
  stream->wait(*written);
  stream->copy(there.data, pooled->data(), kCount * sizeof(float));
  stream->record(*event);
  wait_for(*event);
  return static_cast<const float*>(there.data)[kCount - 1];
}

TEST(PeerAccess, IsDroppedIfWhatArrivesIsWrongInEitherDirection) {
  for (const bool both : {false, true}) {
    for (const bool first : {false, true}) {
      boot_machine({.device_count = 2});
      fake::lie(first ? 0 : 1, first ? 1 : 0);
      if (both) fake::lie(first ? 1 : 0, first ? 0 : 1);
      {
        const auto device = open_device(0);
        const auto peer = open_device(1);
        EXPECT_FALSE(device->accesses(*peer));
        EXPECT_EQ(device->link_to(*peer), LinkKind::wrong_peer);
        EXPECT_EQ(peer->link_to(*device), LinkKind::wrong_peer);
        EXPECT_FALSE(fake::peer_access(0, 1)) << "the driver stages copies of others then";
        EXPECT_FALSE(fake::peer_access(1, 0));
        const auto again = open_device(1);
        EXPECT_FALSE(fake::peer_access(0, 1)) << "what is known to be wrong is not tried again";
        EXPECT_EQ(copied(*device, *peer), 14.0F);
      }
      EXPECT_EQ(fake::driver_staged_copies(), 0);
      EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
      EXPECT_EQ(fake::problems(), std::vector<std::string>{});
    }
  }
}

TEST(PeerAccess, IsDroppedForThePairAlone) {
  boot_machine({.device_count = 3, .switch_size = 3});
  fake::lie(0, 2);
  const Communicator communicator(group_of({"cuda:0", "cuda:1", "cuda:2"}), {.transport = Transport::copies});
  EXPECT_TRUE(
      communicator.description().ends_with("by PCIe peer access; between cuda:0 and cuda:2 through the host, because "
                                           "direct copies arrived wrong"))
      << communicator.description();
}

TEST(PeerAccess, CanBeSwitchedOff) {
  boot_machine({.device_count = 2});
  setenv("PACELINE_PEER_ACCESS", "0", 1);
  const auto device = open_device(0);
  const auto peer = open_device(1);
  unsetenv("PACELINE_PEER_ACCESS");
  EXPECT_EQ(device->link_to(*peer), LinkKind::through_host);
  EXPECT_EQ(copied(*device, *peer), 14.0F);
  EXPECT_EQ(fake::driver_staged_copies(), 0);
}

TEST(PeerAccess, IsNotUsedWhereAPoolCannotBeShared) {
  boot_machine({.device_count = 3, .switch_size = 3});
  fake::refuse_pool_access(1);
  {
    const auto device = open_device(0);
    const auto peer = open_device(1);
    const auto third = open_device(2);
    EXPECT_FALSE(device->accesses(*peer));
    EXPECT_EQ(device->link_to(*peer), LinkKind::through_host);
    EXPECT_TRUE(device->accesses(*third));
    EXPECT_EQ(copied(*device, *peer), 14.0F);
  }
  EXPECT_EQ(fake::driver_staged_copies(), 0);
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(PeerAccess, WorksOnGpusWithoutPools) {
  boot_machine({.device_count = 2, .pools = false});
  {
    const auto device = open_device(0);
    const auto peer = open_device(1);
    EXPECT_TRUE(device->accesses(*peer));
    EXPECT_EQ(copied(*device, *peer), 14.0F);
    const auto stream = device->make_stream();
    auto memory = device->allocate(std::size_t{1} << 20, *stream);
    EXPECT_TRUE(device->shares(memory->data()));
    EXPECT_EQ(device->peak_bytes(), std::size_t{1} << 20);
    stream->zero(memory->data(), memory->bytes());
    memory.reset();
    device->release_memory();
    EXPECT_EQ(device->peak_bytes(), std::size_t{1} << 20);
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(HostPath, IsWhatStreamsUseWithoutPeerAccess) {
  boot_machine({.device_count = 2, .switch_size = kNoPeers});
  {
    const OrdinaryMemory here(0, 0.0F);
    const OrdinaryMemory there(1, 10.0F);
    const auto device = open_device(0);
    const auto peer = open_device(1);
    const auto stream = device->make_stream();
    const auto done = device->make_event(false);
    stream->copy(here.data, there.data, kCount * sizeof(float));
    stream->record(*done);
    wait_for(*done);
    EXPECT_EQ(static_cast<const float*>(here.data)[kCount - 1], 14.0F);
    EXPECT_EQ(fake::driver_staged_copies(), 0);
  }
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
  EXPECT_TRUE(fake::problems().empty());
}

TEST(HostPath, IsNamedByTheTransport) {
  const auto description = [](int switch_size, const std::vector<std::string>& devices) {
    boot_machine({.device_count = 3, .switch_size = switch_size});
    return Communicator(group_of(devices), {.transport = Transport::copies}).description();
  };
  EXPECT_TRUE(description(3, {"cuda:0", "cuda:1", "cuda:2"}).ends_with("(as asked for), by PCIe peer access"));
  EXPECT_TRUE(description(kNoPeers, {"cuda:0", "cuda:1", "cuda:2"}).ends_with("(as asked for), through the host"));
  EXPECT_TRUE(description(2, {"cuda:0", "cuda:1", "cuda:2"})
                  .ends_with("by PCIe peer access; between cuda:0 and cuda:2, cuda:1 and cuda:2 through the host"));
}

}  // namespace
}  // namespace paceline::cuda

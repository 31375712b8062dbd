// SPDX-License-Identifier: Apache-2.0
//
// Collectives of GPUs that are refused, fail or do not end.
#include <paceline/comm/communicator.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device_group.hpp>

#include "collective_cases.hpp"
#include "interrupts.hpp"
#include "nccl_communicators.hpp"
#include "nccl_library.hpp"
#include "nccl_machine.hpp"
#include "orders.hpp"

namespace paceline {
namespace {

TEST(CudaCommunicatorFailures, RefusesCallsAfterItsEnd) {
  boot(1, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
  Communicator communicator(group, {.warm_up_bytes = 0});
  GpuArrays arrays(group, 4);
  communicator.broadcast(arrays.views());
  communicator.wait();
  communicator.close();
  communicator.close();
  EXPECT_TRUE(says(thrown_by<Unavailable>([&] { communicator.all_reduce(arrays.views()); }), "closed"));
  EXPECT_TRUE(says(thrown_by<Unavailable>([&] { communicator.wait(); }), "closed"));
}

TEST(CudaCommunicatorFailures, WhoIsInterruptedWaitsForNoHangAndFreesNothingInUse) {
  boot(1, 1);
  const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1"});
  GpuArrays arrays(group, 4);
  Communicator communicator(group);
  const Words ones(4, 1.0F);
  const auto late = arrays.views()[1].stream;
  fake::hang(late);
  for (std::size_t d = 0; d < 2; ++d) arrays.fill(d, ones);
  communicator.all_reduce(arrays.views());
  {
    const Interrupting soon;
    EXPECT_THROW(communicator.close(), Interrupt);
  }
  EXPECT_TRUE(says(thrown_by<Unavailable>([&] { communicator.wait(); }), "closed"));
  fake::go_on(late);
  std::vector<Words> after(2);
  for (std::size_t d = 0; d < 2; ++d) arrays.read(d, after[d]);
  arrays.wait();
  for (const Words& each : after) EXPECT_EQ(each, Words(4, 2.0F)) << "what was enqueued is done all the same";
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

/// What a device was given before a collective never ends: with the host's devices the call itself waits.
class Late : public ::testing::TestWithParam<Box> {};

TEST_P(Late, IsATimeoutThatNamesTheDeviceAndTheNextCallIsWell) {
  for_each_order(4, 2, [&](fake::Nccl& nccl, std::uint64_t) {
    const DeviceGroup group = group_of(GetParam().devices);
    const std::size_t n = group.size();
    const bool with_nccl = GetParam().transport == Transport::nccl;
    CommunicatorOptions options = GetParam().options();
    options.timeout = std::chrono::milliseconds(300);  // a busy machine lets threads in late
    Communicator communicator(group, options);
    GpuArrays arrays(group, 4);
    const Words ones(4, 1.0F);
    const auto late = arrays.views()[1].stream;
    fake::hang(late);
    for (std::size_t d = 0; d < n; ++d) arrays.fill(d, ones);
    const auto error = thrown_by<Timeout>([&] {
      communicator.all_reduce(arrays.views());
      communicator.wait();
    });
    ASSERT_EQ(error.device(), group.devices()[1].name) << error.what();
    ASSERT_TRUE(says(error, "before the collective has not ended within 0.6 s")) << error.what();
    ASSERT_EQ(nccl.aborted(), with_nccl ? 2 : 0) << "the other GPU's kernel would wait for ever";
    fake::go_on(late);
    for (std::size_t d = 0; d < n; ++d) arrays.fill(d, ones);
    communicator.all_reduce(arrays.views());
    std::vector<Words> after(n);
    for (std::size_t d = 0; d < n; ++d) arrays.read(d, after[d]);
    communicator.wait();
    arrays.wait();
    for (const Words& each : after) ASSERT_EQ(each, Words(4, static_cast<float>(n)));
    ASSERT_EQ(nccl.made(), with_nccl ? 4 : 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Late,
                         ::testing::Values(Box{"TwoPartitions", 1, {"cuda:0/0", "cuda:0/1"}},
                                           Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}, Transport::nccl},
                                           Box{"TwoGpusByCopies", 2, {"cuda:0", "cuda:1"}, Transport::copies},
                                           Box{"HostAndGpu", 1, {"host:0", "cuda:0"}}),
                         [](const auto& param) { return param.param.name; });

TEST(CudaCommunicatorFailures, NamesTheDeviceThatBroke) {
  for (const Transport transport : {Transport::nccl, Transport::copies}) {
    boot(2, 2);
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    Communicator communicator(group, {.transport = transport, .warm_up_bytes = 0});
    GpuArrays arrays(group, 4);
    fake::poison(1, cudaErrorIllegalAddress);
    const auto error = thrown_by<DeviceLost>([&] { communicator.all_reduce(arrays.views()); });
    EXPECT_EQ(error.device(), "cuda:1") << error.what();
  }
}

/// NCCL only says that a call of CUDA failed.
TEST(CudaCommunicatorFailures, NamesTheLostDeviceWhereNcclNoticesItFirst) {
  fake::Nccl& nccl = boot(1, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
  std::vector<internal::Endpoint> endpoints;
  for (const Device& device : group.devices()) {
    const std::shared_ptr<AsyncDevice> opened = backend_of(device).open(device);
    endpoints.push_back({device, opened, opened->make_stream()});
  }
  nccl::Communicators communicators(nccl::library(), endpoints, std::chrono::seconds(30));
  nccl.fail("ncclGetUniqueId", fake::Nccl::kAnyRank, nccl::kUnhandledCudaError);
  fake::poison(1, cudaErrorECCUncorrectable);
  const auto lost = thrown_by<DeviceLost>([&] { communicators.open(0); });
  EXPECT_EQ(lost.device(), "cuda:1");
  EXPECT_TRUE(says(lost, "cudaErrorECCUncorrectable")) << lost.what();
}

TEST(CudaCommunicatorFailures, LeavesTheBuffersToTheirOwnersAfterAFailure) {
  for_each_order(kOrders, 2, [&](fake::Nccl&, std::uint64_t seed) {
    const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1", "cuda:1", "host:0"});
    Communicator communicator(group, {.transport = Transport::copies});
    GpuArrays arrays(group, 4);
    const Words ones(4, 1.0F);
    for (std::size_t d = 0; d < 4; ++d) arrays.fill(d, ones);
    fake::fail_allocation(static_cast<int>(seed % 3));  // of staging, of the landing, of the link's
    EXPECT_THROW(communicator.all_reduce(arrays.views()), OutOfMemory);
    std::vector<Words> after(4);
    for (std::size_t d = 0; d < 4; ++d) {
      arrays.fill(d, ones);
      arrays.read(d, after[d]);
    }
    communicator.all_reduce(arrays.views());
    for (std::size_t d = 0; d < 4; ++d) arrays.read(d, after[d]);
    arrays.wait();
    for (std::size_t d = 0; d < 4; ++d) EXPECT_EQ(after[d], Words(4, 4.0F));
  });
}

TEST(CudaCommunicatorFailures, RefusesASecondCallAtTheSameTime) {
  fake::Nccl& nccl = boot(1, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
  Communicator communicator(group, {.warm_up_bytes = 0});
  GpuArrays arrays(group, 4);
  nccl.hold("ncclAllReduce", 1);
  std::thread first([&] { communicator.all_reduce(arrays.views()); });
  while (nccl.inside() == 0) std::this_thread::yield();
  EXPECT_THROW(communicator.all_reduce(arrays.views()), InvalidArgument);
  nccl.release();
  first.join();
  communicator.wait();
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/gpu_facts.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <paceline/runtime/device.hpp>

#include "cuda_backend.hpp"
#include "errors.hpp"
#include "fake_cuda.hpp"

namespace paceline {
namespace {

using Names = std::vector<std::string>;

TEST(GpuFacts, SaysWhatTheDriverKnows) {
  fake::boot({.device_count = 3, .memory_bytes = std::size_t{1} << 30, .driver_version = 13010});
  const std::vector<GpuFacts> all = gpu_facts();
  ASSERT_EQ(all.size(), 3U);
  const GpuFacts& gpu = all[1];
  EXPECT_EQ(gpu.device, "cuda:1");
  EXPECT_EQ(gpu.model, "Fake GPU 1");
  EXPECT_EQ(gpu.pci_bus_id, "0000:02:00.0");
  EXPECT_EQ(gpu.numa_node, 0);
  EXPECT_EQ(gpu.compute_capability, (CudaVersion{9, 0}));
  EXPECT_EQ(gpu.sm_count, 132);
  EXPECT_EQ(gpu.peak_clock_khz, 1'980'000);
  EXPECT_EQ(gpu.memory_bytes, std::uint64_t{1} << 30);
  EXPECT_EQ(gpu.copy_engine_count, 3);
  EXPECT_EQ(gpu.partition_sm_count, 8);
  EXPECT_EQ(gpu.most_partitions, 16);
  EXPECT_EQ(gpu.why_no_partitions, "");
  EXPECT_EQ(gpu.driver, (CudaVersion{13, 1}));
  EXPECT_EQ(gpu.runtime, (CudaVersion{CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10}));
  EXPECT_EQ(all[0].peers, Names{"cuda:1"});
  EXPECT_EQ(all[1].peers, Names{"cuda:0"});
  EXPECT_EQ(all[2].peers, Names{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(GpuFacts, SaysWhyAGpuHasNoParts) {
  fake::boot({.driver_version = 12040});
  EXPECT_TRUE(says(gpu_facts().front().why_no_partitions, "CUDA 12.5 or newer"));
  EXPECT_EQ(gpu_facts().front().most_partitions, 0);
  fake::boot({.multiprocessors = 4});
  EXPECT_EQ(gpu_facts().front().why_no_partitions, "CUDA makes no groups of its SMs");
}

// CUDA shows a process one slice, under the GPU's PCI address and with a name of its own.
TEST(GpuFacts, TakeASliceOfAGpuForWhatItIs) {
  fake::boot(
      {.memory_bytes = std::size_t{10} << 30, .model = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", .multiprocessors = 16});
  const std::vector<Device> devices = CudaBackend().devices();
  ASSERT_EQ(devices.size(), 1U);
  EXPECT_EQ(devices[0].name, "cuda:0");
  EXPECT_EQ(devices[0].part, -1) << "it is no part that paceline has made";
  EXPECT_EQ(devices[0].sm_count, 16);
  EXPECT_EQ(devices[0].device_class, "NVIDIA H100 80GB HBM3 MIG 1g.10gb, 16 SMs");
  const GpuFacts slice = gpu_facts().front();
  EXPECT_EQ(slice.model, "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
  EXPECT_EQ(slice.sm_count, 16);
  EXPECT_EQ(slice.memory_bytes, std::uint64_t{10} << 30);
  EXPECT_EQ(slice.most_partitions, 2) << "of its own SMs, not of the whole GPU's";
  EXPECT_TRUE(slice.mig.starts_with("CUDA shows a process one slice")) << slice.mig;
  const auto none = thrown_by<InvalidArgument>([] { static_cast<void>(find_device("cuda:1")); });
  EXPECT_TRUE(says(none, "the only GPU is cuda:0, a MIG slice.")) << none.what();
  EXPECT_TRUE(says(none, "start a process for each slice")) << none.what();
}

TEST(GpuFacts, TellAWholeGpuFromASlice) {
  fake::boot({.device_count = 2});
  EXPECT_EQ(gpu_facts().front().mig, "");
  const auto none = thrown_by<InvalidArgument>([] { static_cast<void>(find_device("cuda:2")); });
  EXPECT_TRUE(says(none, "the last GPU is cuda:1")) << none.what();
  EXPECT_FALSE(says(none, "MIG")) << none.what();
}

TEST(GpuFacts, SayThatTheNamedSliceIsNotThere) {
  setenv("CUDA_VISIBLE_DEVICES", "MIG-4a5c", 1);
  fake::boot({.device_count = 0});
  const std::string why = CudaBackend().why_none();
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_TRUE(why.starts_with("the driver shows no GPU, though CUDA_VISIBLE_DEVICES is MIG-4a5c")) << why;
}

TEST(GpuFacts, AreNoneWithoutAGpu) {
  fake::boot({.driver_present = false});
  EXPECT_TRUE(gpu_facts().empty());
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/gpu_facts.hpp>

#include "cuda_backend.hpp"
#include "errors.hpp"
#include "fake_cuda.hpp"
#include "partitions.hpp"

namespace paceline::cuda {
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

using Groups = std::vector<int>;

Groups deal(const std::vector<double>& fractions, int group_count) {
  return deal_groups(fractions, group_count, "cuda:0");
}

int sum(const Groups& groups) { return std::accumulate(groups.begin(), groups.end(), 0); }

double missed(const std::vector<double>& fractions, int group_count, const Groups& groups) {
  double total = 0.0;
  for (std::size_t i = 0; i < groups.size(); ++i) total += std::abs(groups[i] - fractions[i] * group_count);
  return total;
}

/// The least that any dealing of `total` groups misses what was asked for by, each part rounded down or up.
double least_missed(const std::vector<double>& fractions, int group_count, int total) {
  double least = std::numeric_limits<double>::infinity();
  for (std::uint64_t up = 0; up < (std::uint64_t{1} << fractions.size()); ++up) {
    Groups groups;
    for (std::size_t i = 0; i < fractions.size(); ++i) {
      groups.push_back(static_cast<int>(std::floor(fractions[i] * group_count)) + static_cast<int>(up >> i & 1));
    }
    if (sum(groups) == total) least = std::min(least, missed(fractions, group_count, groups));
  }
  return least;
}

/// Random fractions of at least a group each, that sum to at most 1; some of them equal.
std::vector<double> random_fractions(std::mt19937_64& random, int group_count) {
  const auto below = [&](int bound) { return static_cast<int>(random() % static_cast<std::uint64_t>(bound)); };
  const int parts = 1 + below(std::min(8, group_count));
  const int sizes = 1 + below(parts);  // how many different ones
  std::vector<double> distinct;
  for (int k = 0; k < sizes; ++k) distinct.push_back(1.0 + below(1000) / 100.0);
  std::vector<double> fractions;
  for (int k = 0; k < parts; ++k) fractions.push_back(distinct[static_cast<std::size_t>(below(sizes))]);
  const double total = std::accumulate(fractions.begin(), fractions.end(), 0.0) * (below(2) == 0 ? 1.0 : 1.2);
  for (double& fraction : fractions) fraction = std::max(fraction / total, 1.0 / group_count);
  const double after = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  return after <= 1.0 + 1e-9 ? fractions : std::vector<double>(fractions.size(), 1.0 / static_cast<double>(parts));
}

TEST(SmGroups, AreAsNearToTheFractionsAsAnyDealing) {
  std::mt19937_64 random(7);
  for (const int sms : {14, 16, 30, 46, 72, 84, 108, 114, 128, 132, 144, 148, 170, 188}) {
    for (const int granularity : {1, 2, 4, 8, 16}) {
      const int group_count = sms / granularity;
      if (group_count == 0) continue;
      for (int round = 0; round < 300; ++round) {
        const std::vector<double> fractions = random_fractions(random, group_count);
        const Groups groups = deal(fractions, group_count);
        const auto say = [&] { return ::testing::PrintToString(fractions) + " of " + std::to_string(group_count); };
        ASSERT_EQ(groups.size(), fractions.size());
        ASSERT_LE(sum(groups), group_count) << say();
        int most_alike = 1;
        for (std::size_t i = 0; i < groups.size(); ++i) {
          ASSERT_GE(groups[i], 1) << say();
          ASSERT_LT(std::abs(groups[i] - fractions[i] * group_count), 1.0) << say();
          for (std::size_t j = 0; j < groups.size(); ++j) {
            ASSERT_TRUE(fractions[i] != fractions[j] || groups[i] == groups[j]) << say();
            ASSERT_TRUE(fractions[i] <= fractions[j] || groups[i] >= groups[j]) << say();
          }
          most_alike =
              std::max(most_alike, static_cast<int>(std::count(fractions.begin(), fractions.end(), fractions[i])));
        }
        const double wanted = std::accumulate(fractions.begin(), fractions.end(), 0.0) * group_count;
        const int whole = static_cast<int>(std::floor(wanted + 1e-6));
        ASSERT_GT(sum(groups), whole - most_alike) << say() << ": more is left than equal parts explain";
        if (most_alike > 1) continue;
        ASSERT_EQ(sum(groups), whole) << say();
        ASSERT_NEAR(missed(fractions, group_count, groups), least_missed(fractions, group_count, whole), 1e-5) << say();
      }
    }
  }
}

TEST(SmGroups, OfAnH100) {
  EXPECT_EQ(deal({1.0}, 16), (Groups{16}));
  EXPECT_EQ(deal({0.5, 0.5}, 16), (Groups{8, 8}));
  EXPECT_EQ(deal({0.75, 0.25}, 16), (Groups{12, 4}));
  EXPECT_EQ(deal({0.7, 0.3}, 16), (Groups{11, 5}));
  EXPECT_EQ(deal({0.5, 0.25}, 16), (Groups{8, 4}));
  EXPECT_EQ(deal({1.0 / 3, 1.0 / 3, 1.0 / 3}, 16), (Groups{5, 5, 5})) << "equal parts, and one group left";
  EXPECT_EQ(deal({0.4, 0.35, 0.25}, 16), (Groups{6, 6, 4}));
  EXPECT_EQ(deal(std::vector<double>(16, 1.0 / 16), 16), Groups(16, 1));
}

TEST(SmGroups, AreNotLostToRoundingErrors) {
  EXPECT_EQ(deal(std::vector<double>(10, 0.1), 10), Groups(10, 1));
  EXPECT_EQ(deal({0.1 + 0.2, 0.7}, 10), (Groups{3, 7}));
  EXPECT_EQ(deal({1.0 - 0.9, 0.9}, 10), (Groups{1, 9}));
}

TEST(SmGroups, NameASmallestFractionThatIsAccepted) {
  for (int group_count = 1; group_count <= 200; ++group_count) {
    const auto error = thrown_by<InvalidArgument>([&] { static_cast<void>(deal({0.9 / group_count}, group_count)); });
    const std::string text = error.what();
    const std::string before = "smallest possible fraction is ";
    const double smallest = std::stod(text.substr(text.find(before) + before.size()));
    EXPECT_EQ(deal({std::min(smallest, 1.0)}, group_count).front(), 1) << text;
    EXPECT_LT(smallest, 1.0 / group_count + 2e-4) << text;
  }
}

}  // namespace
}  // namespace paceline::cuda

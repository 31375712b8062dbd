// SPDX-License-Identifier: Apache-2.0
//
// Collectives of GPUs, of parts of one, and of both beside the host: right, and in the order of the buffers' streams,
// whatever order the fake runs things in.
#include <paceline/comm/communicator.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "gpu_arrays.hpp"
#include "nccl_host.hpp"
#include "orders.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

struct Box {
  const char* name;
  int gpus;
  std::vector<std::string> devices;
  Transport transport = Transport::automatic;
};

void PrintTo(const Box& box, std::ostream* out) { *out << box.name; }

fake::Nccl& boot(std::uint64_t seed, int gpus) {
  fake::boot({.seed = seed, .device_count = gpus});
  fake::set_twins();
  set_user_twins();
  return fake::boot_nccl();
}

CommunicatorOptions options_of(const Box& box) { return {.transport = box.transport, .warm_up_bytes = 64}; }

using Values = std::vector<std::vector<float>>;  // of each device

/// One call, what it writes by the plain definition, and how its arrays are used before and after.
class Call {
 public:
  Call(const DeviceGroup& group, std::uint64_t random)
      : n_(group.size()), part_(1 + random % 5), kind_(random / 8 % 5), root_(random / 64 % n_) {
    const bool scatters = kind_ == 2;
    const bool gathers = kind_ == 3;
    in_count_ = scatters ? part_ * n_ : part_;
    out_count_ = gathers ? part_ * n_ : part_;
  }

  [[nodiscard]] bool in_place() const { return kind_ != 2 && kind_ != 3; }
  [[nodiscard]] std::size_t in_count() const { return in_count_; }
  [[nodiscard]] std::size_t out_count() const { return out_count_; }

  void run(Communicator& communicator, const std::vector<BufferView>& in, const std::vector<BufferView>& out) const {
    if (kind_ == 0) communicator.all_reduce(in, ReduceOp::sum);
    if (kind_ == 1) communicator.all_reduce(in, ReduceOp::mean);
    if (kind_ == 2) communicator.reduce_scatter(in, out, ReduceOp::sum);
    if (kind_ == 3) communicator.all_gather(in, out);
    if (kind_ == 4) communicator.broadcast(in, root_);
  }

  [[nodiscard]] Values expected(const Values& in) const {
    Values out(n_, std::vector<float>(out_count_, 0.0F));
    for (std::size_t d = 0; d < n_; ++d) {
      for (std::size_t i = 0; i < out_count_; ++i) {
        float& value = out[d][i];
        const auto total = [&](std::size_t at) {
          float sum = 0.0F;
          for (const auto& one : in) sum += one[at];
          return sum;
        };
        if (kind_ == 0) value = total(i);
        if (kind_ == 1) value = total(i) / static_cast<float>(n_);
        if (kind_ == 2) value = total(d * part_ + i);
        if (kind_ == 3) value = in[i / part_][i % part_];
        if (kind_ == 4) value = in[root_][i];
      }
    }
    return out;
  }

 private:
  std::size_t n_;
  std::size_t part_;
  std::uint64_t kind_;
  std::size_t root_;
  std::size_t in_count_ = 0;
  std::size_t out_count_ = 0;
};

void expect_clean(std::uint64_t seed) {
  const std::vector<std::string> problems = fake::problems();
  ASSERT_TRUE(problems.empty()) << "seed " << seed << ": " << problems.front();
}

class OnGpus : public ::testing::TestWithParam<Box> {};

TEST_P(OnGpus, ReducesAndMovesInTheOrderOfTheBuffersStreams) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    std::mt19937_64 random(seed);
    fake::Nccl& nccl = boot(seed, GetParam().gpus);
    const DeviceGroup group = group_of(GetParam().devices);
    {
      Communicator communicator(group, options_of(GetParam()));
      for (int round = 0; round < 3; ++round) {
        const Call call(group, random());
        GpuArrays in(group, call.in_count());
        GpuArrays out(group, call.out_count());
        GpuArrays& result = call.in_place() ? in : out;
        Values before(group.size(), std::vector<float>(call.in_count()));
        Values after(group.size());
        Values again(group.size(), std::vector<float>(call.in_count(), -1.0F));
        for (std::size_t d = 0; d < group.size(); ++d) {
          for (float& value : before[d]) value = static_cast<float>(random() % 16);
          in.fill(d, before[d]);
        }
        call.run(communicator, in.views(), out.views());
        for (std::size_t d = 0; d < group.size(); ++d) {
          result.read(d, after[d]);
          in.fill(d, again[d]);
        }
        in.wait();
        out.wait();
        const Values expected = call.expected(before);
        for (std::size_t d = 0; d < group.size(); ++d) {
          for (std::size_t i = 0; i < call.out_count(); ++i) {
            ASSERT_NEAR(after[d][i], expected[d][i], 1e-5) << "seed " << seed << ", device " << d << ", element " << i;
          }
        }
      }
      ASSERT_EQ(fake::synchronize_calls(), 0) << "seed " << seed;
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
    ASSERT_EQ(nccl.communicators(), 0);
    ASSERT_EQ(nccl.problems(), std::vector<std::string>{});
    ASSERT_EQ(nccl.aborted(), 0);
  }
}

const std::vector<std::string> kEverything{"host:0", "cuda:0/0", "cuda:0/1", "cuda:1",
                                           "host:1", "cuda:2/0", "cuda:2/1"};

INSTANTIATE_TEST_SUITE_P(
    Cuda, OnGpus,
    ::testing::Values(Box{"TwoPartitions", 1, {"cuda:0/0", "cuda:0/1"}}, Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}},
                      Box{"TwoGpusByCopies", 2, {"cuda:0", "cuda:1"}, Transport::copies},
                      Box{"ThreeGpusByCopies", 3, {"cuda:2", "cuda:0", "cuda:1"}, Transport::copies},
                      Box{"FourGpus", 4, {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}},
                      Box{"GpuAndHost", 1, {"host:0", "cuda:0", "host:1"}}, Box{"Everything", 3, kEverything},
                      Box{"EverythingByCopies", 3, kEverything, Transport::copies}),
    [](const auto& param) { return param.param.name; });

TEST(CudaCommunicator, WritesInPlaceWhereThePartsLieInTheWholes) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1", "cuda:1", "host:0"});
    {
      Communicator communicator(group, {.warm_up_bytes = 0});
      constexpr std::size_t part = 3;
      GpuArrays whole(group, part * 4);
      Values values(4);
      for (std::size_t d = 0; d < 4; ++d) {
        for (std::size_t i = 0; i < part * 4; ++i) values[d].push_back(static_cast<float>(100 * d + i));
        whole.fill(d, values[d]);
      }
      std::vector<BufferView> parts = whole.views();
      for (std::size_t d = 0; d < 4; ++d) {
        parts[d].data = static_cast<float*>(parts[d].data) + d * part;
        parts[d].count = part;
      }
      communicator.all_gather(parts, whole.views());
      communicator.reduce_scatter(whole.views(), parts);
      Values after(4);
      for (std::size_t d = 0; d < 4; ++d) whole.read(d, after[d]);
      whole.wait();
      for (std::size_t d = 0; d < 4; ++d) {
        for (std::size_t i = 0; i < part * 4; ++i) {
          const auto gathered = static_cast<float>(100 * (i / part) + i);
          ASSERT_EQ(after[d][i], i / part == d ? 4 * gathered : gathered) << "seed " << seed;
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{});
  }
}

TEST(CudaCommunicator, TakesNoStreamForTheLegacyDefaultStream) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    Communicator communicator(group, {.warm_up_bytes = 0});
    GpuArrays arrays(group, 4);
    const std::vector<float> ones(4, 1.0F);
    std::vector<BufferView> views = arrays.views();
    for (std::size_t d = 0; d < 2; ++d) {
      views[d].stream = nullptr;
      FillWork work{static_cast<float*>(views[d].data), ones.data(), 4};
      void* arguments[] = {&work};
      arrays.wait();
      ASSERT_EQ(cudaSetDevice(static_cast<int>(d)), cudaSuccess);
      ASSERT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&fill_kernel), dim3(1), dim3(1), arguments, 0,
                                 cudaStreamLegacy),
                cudaSuccess);
    }
    communicator.all_reduce(views);
    communicator.wait();
    std::vector<float> after;
    arrays.read(1, after);
    arrays.wait();
    EXPECT_EQ(after, std::vector<float>(4, 2.0F));
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
  }
}

TEST(CudaCommunicator, GrowsWithItsBuffersAndHoldsNoThreadForIt) {
  boot(3, 2);
  const DeviceGroup group = group_of({"cuda:0", "host:0", "cuda:1"});
  Communicator communicator(group, {.transport = Transport::copies});
  for (const std::size_t count : {1U, 100U, 7U, 1000U, 100000U, 3U}) {
    GpuArrays arrays(group, count);
    const std::vector<float> ones(count, 1.0F);
    Values after(3);
    for (std::size_t d = 0; d < 3; ++d) arrays.fill(d, ones);
    communicator.all_reduce(arrays.views());
    for (std::size_t d = 0; d < 3; ++d) arrays.read(d, after[d]);
    arrays.wait();
    for (std::size_t d = 0; d < 3; ++d) EXPECT_EQ(after[d], std::vector<float>(count, 3.0F));
  }
  EXPECT_EQ(fake::synchronize_calls(), 0);
  ASSERT_NO_FATAL_FAILURE(expect_clean(3));
}

TEST(CudaCommunicator, SaysHowDataGetsAcross) {
  boot(1, 2);
  const auto description = [](const std::vector<std::string>& names, Transport transport) {
    return Communicator(group_of(names), {.transport = transport, .warm_up_bytes = 0}).description();
  };
  EXPECT_EQ(description({"cuda:0", "cuda:1"}, Transport::automatic),
            std::string("NCCL 2.30.7 (") + FAKE_NCCL_PATH + ")");
  EXPECT_EQ(description({"cuda:1", "cuda:0"}, Transport::copies), "copies through cuda:1 (as asked for)");
  EXPECT_EQ(description({"cuda:0/0", "cuda:0/1"}, Transport::nccl), "the memory of cuda:0");
  EXPECT_EQ(description({"host:0", "host:1"}, Transport::automatic), "the host's memory");
}

TEST(CudaCommunicator, RefusesWhatItCannotDoAndWritesNothing) {
  boot(1, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
  Communicator communicator(group, {.warm_up_bytes = 0});
  GpuArrays arrays(group, 4);
  const auto message = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Unavailable& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_NE(message([&] { communicator.all_reduce(arrays.views(), ReduceOp::max); }).find("'max' is not there"),
            std::string::npos);
  std::vector<BufferView> integers = arrays.views();
  for (BufferView& view : integers) view.dtype = DType::int32;
  EXPECT_NE(message([&] { communicator.all_reduce(integers); }).find("int32 are not reduced"), std::string::npos);
  communicator.broadcast(integers);
  communicator.wait();
  communicator.close();
  communicator.close();
  EXPECT_NE(message([&] { communicator.all_reduce(arrays.views()); }).find("closed"), std::string::npos);
  EXPECT_NE(message([&] { communicator.wait(); }).find("closed"), std::string::npos);
}

TEST(CudaCommunicator, NamesTheDeviceThatBroke) {
  for (const Transport transport : {Transport::nccl, Transport::copies}) {
    boot(2, 2);
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    Communicator communicator(group, {.transport = transport, .warm_up_bytes = 0});
    GpuArrays arrays(group, 4);
    fake::poison(1, cudaErrorIllegalAddress);
    try {
      communicator.all_reduce(arrays.views());
      FAIL();
    } catch (const DeviceLost& error) {
      EXPECT_EQ(error.device(), "cuda:1") << error.what();
    }
  }
}

TEST(CudaCommunicator, LeavesTheBuffersToTheirOwnersAfterAFailure) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1", "cuda:1", "host:0"});
    {
      Communicator communicator(group, {.transport = Transport::copies});
      GpuArrays arrays(group, 4);
      const std::vector<float> ones(4, 1.0F);
      for (std::size_t d = 0; d < 4; ++d) arrays.fill(d, ones);
      fake::fail_allocation(static_cast<int>(seed % 3));  // of staging, of the landing, of the clique's
      EXPECT_THROW(communicator.all_reduce(arrays.views()), OutOfMemory);
      Values after(4);
      for (std::size_t d = 0; d < 4; ++d) {
        arrays.fill(d, ones);
        arrays.read(d, after[d]);
      }
      communicator.all_reduce(arrays.views());
      for (std::size_t d = 0; d < 4; ++d) arrays.read(d, after[d]);
      arrays.wait();
      for (std::size_t d = 0; d < 4; ++d) EXPECT_EQ(after[d], std::vector<float>(4, 4.0F));
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

TEST(CudaCommunicator, RefusesASecondCallAtTheSameTime) {
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

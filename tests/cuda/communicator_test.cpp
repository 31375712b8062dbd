// SPDX-License-Identifier: Apache-2.0
//
// Collectives of GPUs, of parts of one, and of both beside the host: right, and in the order of the buffers' streams,
// whatever order the fake runs things in.
#include <paceline/comm/communicator.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device_group.hpp>

#include "collective_cases.hpp"
#include "comm/link.hpp"
#include "nccl_machine.hpp"
#include "orders.hpp"

namespace paceline {
namespace {

class OnGpus : public ::testing::TestWithParam<Box> {};

TEST_P(OnGpus, ReducesAndMovesInTheOrderOfTheBuffersStreams) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    std::mt19937_64 random(seed);
    fake::Nccl& nccl = boot(seed, GetParam().gpus);
    const DeviceGroup group = group_of(GetParam().devices);
    {
      Communicator communicator(group, GetParam().options());
      for (int round = 0; round < 3; ++round) {
        const Call call(group.size(), random);
        GpuArrays in(group, words_of(call.in_count, call.dtype));
        GpuArrays out(group, words_of(call.out_count, call.dtype));
        GpuArrays& result = call.in_place() ? in : out;
        std::vector<Words> before;
        std::vector<Words> after(group.size());
        const Words again(words_of(call.in_count, call.dtype), -1.0F);
        const Words over(words_of(call.out_count, call.dtype), -1.0F);
        for (std::size_t d = 0; d < group.size(); ++d) {
          before.push_back(some_elements(call.in_count, call.dtype, random));
        }
        for (std::size_t d = 0; d < group.size(); ++d) in.fill(d, before[d]);
        call.run(communicator, in.views(), out.views());
        for (std::size_t d = 0; d < group.size(); ++d) {
          result.read(d, after[d]);
          in.fill(d, again);
          out.fill(d, over);
        }
        in.wait();
        out.wait();
        for (std::size_t d = 0; d < group.size(); ++d) {
          for (std::size_t i = 0; i < call.out_count; ++i) {
            ASSERT_TRUE(call.right(d, i, after[d], before))
                << call.name() << ", seed " << seed << ", device " << d << ", element " << i;
          }
        }
      }
      ASSERT_EQ(fake::synchronize_calls(), 0) << "seed " << seed;
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, seed));
    ASSERT_EQ(nccl.aborted(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, OnGpus, ::testing::ValuesIn(boxes()),
                         [](const auto& param) { return param.param.name; });

/// Each element as the host's own reduction has it: one memory, one pass, one rounding.
TEST(CudaCommunicator, GivesPartsOfOneGpuWhatTheHostWouldGiveToTheBit) {
  std::mt19937_64 random(1);
  fake::Nccl& nccl = boot(1, 1);
  const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1", "cuda:0/2"});
  {
    Communicator communicator(group);
    for (const DType dtype : reference::kDTypes) {
      for (const ReduceOp op : reference::kOps) {
        constexpr std::size_t part = 67;
        constexpr std::size_t count = 3 * part;
        GpuArrays whole(group, words_of(count, dtype));
        GpuArrays parts(group, words_of(part, dtype));
        std::vector<Words> before(3, Words(words_of(count, dtype)));
        std::vector<Words> reduced(3);
        std::vector<Words> scattered(3);
        std::vector<BufferView> in = whole.views();
        std::vector<BufferView> out = parts.views();
        std::vector<const void*> inputs;
        for (std::size_t d = 0; d < 3; ++d) {
          reference::fill(before[d].data(), count, dtype, random);
          inputs.push_back(before[d].data());
          whole.fill(d, before[d]);
          in[d].dtype = out[d].dtype = dtype;
          in[d].count = count;
          out[d].count = part;
        }
        communicator.reduce_scatter(in, out, op);
        communicator.all_reduce(in, op);
        for (std::size_t d = 0; d < 3; ++d) parts.read(d, scattered[d]);
        for (std::size_t d = 0; d < 3; ++d) whole.read(d, reduced[d]);
        parts.wait();
        whole.wait();
        for (std::size_t i = 0; i < count; ++i) {
          const std::uint64_t expected = reference::reduced_bits(inputs, i, dtype, op);
          const auto is_right = [&](const Words& result, std::size_t element) {
            return reference::same(reference::bits_of(result.data(), element, dtype), expected, dtype);
          };
          ASSERT_TRUE(is_right(scattered[i / part], i % part)) << name_of(op) << " of " << name_of(dtype) << ": " << i;
          for (std::size_t d = 0; d < 3; ++d) ASSERT_TRUE(is_right(reduced[d], i)) << name_of(op) << ": " << i;
        }
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
}

/// Parts that lie in the wholes: each in its own device's, or those of one memory in each other's.
class InPlace : public ::testing::TestWithParam<Box> {};

TEST_P(InPlace, WritesWhereThePartsLieInTheWholes) {
  for_each_order(kOrders, 2, [&](fake::Nccl&, std::uint64_t seed) {
    const DeviceGroup group = group_of(GetParam().devices);
    const bool crossed = seed % 2 == 1;
    const std::size_t n = group.size();
    Communicator communicator(group, GetParam().options());
    constexpr std::size_t part = 3;
    GpuArrays whole(group, part * n);
    std::vector<Words> values(n);
    for (std::size_t d = 0; d < n; ++d) {
      for (std::size_t i = 0; i < part * n; ++i) values[d].push_back(static_cast<float>(100 * d + i));
      whole.fill(d, values[d]);
    }
    const std::vector<BufferView> wholes = whole.views();
    std::vector<BufferView> parts;
    for (std::size_t d = 0; d < n; ++d) {
      const std::size_t in =
          crossed && d < 2 && group.devices()[0].memory_space == group.devices()[1].memory_space ? 1 - d : d;
      parts.push_back({static_cast<float*>(wholes[in].data) + d * part, part, DType::float32, wholes[d].stream});
    }
    whole.wait();  // a part may be written on another stream than its whole
    communicator.all_gather(parts, wholes);
    communicator.reduce_scatter(wholes, parts);
    communicator.wait();
    std::vector<Words> after(n);
    for (std::size_t d = 0; d < n; ++d) whole.read(d, after[d]);
    whole.wait();
    for (std::size_t d = 0; d < n; ++d) {
      for (std::size_t i = 0; i < part * n; ++i) {
        const std::size_t of = i / part;
        const auto* const place = static_cast<const float*>(wholes[d].data) + i;
        const bool reduced = place == static_cast<const float*>(parts[of].data) + i % part;
        const std::size_t owner =
            crossed && parts[of].data != static_cast<const float*>(wholes[of].data) + of * part ? 1 - of : of;
        const auto gathered = static_cast<float>(100 * owner + i);
        ASSERT_EQ(after[d][i], reduced ? static_cast<float>(n) * gathered : gathered);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, InPlace,
                         ::testing::Values(Box{"PartsAndHost", 2, {"cuda:0/0", "cuda:0/1", "cuda:1", "host:0"}},
                                           Box{"TwoPartitions", 2, {"cuda:0/0", "cuda:0/1"}},
                                           Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}},
                                           Box{"TwoGpusByCopies", 2, {"cuda:0", "cuda:1"}, Transport::copies},
                                           Box{"TwoByTwo", 2, {"cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1"}}),
                         [](const auto& param) { return param.param.name; });

/// NCCL's kernels access buffers of other GPUs. What they could not access goes through memory of paceline's.
class Owners : public ::testing::TestWithParam<Owner> {};

TEST_P(Owners, GiveNcclOnlyWhatItsKernelsCanAccess) {
  constexpr std::size_t count = 6;
  const bool in_place = GetParam() == Owner::paceline || GetParam() == Owner::program;
  for_each_order(kOrders / 10, 2, [&](fake::Nccl& nccl, std::uint64_t) {
    const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1", "cuda:1", "host:0"});
    const std::size_t devices = group.size();
    Communicator communicator(group, {.transport = Transport::nccl, .warm_up_bytes = 64});
    GpuArrays parts(group, count, GetParam());
    GpuArrays whole(group, count * devices, GetParam());
    std::vector<Words> before;
    std::vector<Words> summed(devices);
    std::vector<Words> sent(devices);
    std::vector<Words> gathered(devices);
    for (std::size_t d = 0; d < devices; ++d) before.emplace_back(count, static_cast<float>(d + 1));
    for (std::size_t root = 0; root < devices; ++root) {
      for (std::size_t d = 0; d < devices; ++d) parts.fill(d, before[d]);
      communicator.all_gather(parts.views(), whole.views());
      for (std::size_t d = 0; d < devices; ++d) whole.read(d, gathered[d]);
      communicator.broadcast(parts.views(), root);
      for (std::size_t d = 0; d < devices; ++d) parts.read(d, sent[d]);
      communicator.all_reduce(parts.views());
      for (std::size_t d = 0; d < devices; ++d) parts.read(d, summed[d]);
      parts.wait();
      whole.wait();
      for (std::size_t d = 0; d < devices; ++d) {
        ASSERT_EQ(sent[d], before[root]);
        ASSERT_EQ(summed[d], Words(count, static_cast<float>(devices * (root + 1))));
        for (std::size_t i = 0; i < count * devices; ++i) ASSERT_EQ(gathered[d][i], before[i / count][0]);
      }
    }
    ASSERT_EQ(nccl.used(parts.views()[2].data, count * sizeof(float)), in_place);
    ASSERT_EQ(nccl.used(whole.views()[2].data, count * sizeof(float)), in_place);
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Owners, ::testing::Values(Owner::paceline, Owner::program, Owner::mapping, Owner::pool));

/// NCCL would fault on them.
TEST(CudaCommunicator, ReducesElementsThatLieAcrossTheirBorders) {
  std::mt19937_64 random(1);
  for (const std::vector<std::string>& names : {std::vector<std::string>{"cuda:0/0", "cuda:0/1", "cuda:1"},
                                                std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2"}}) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
      fake::Nccl& nccl = boot(1, 3);
      const DeviceGroup group = group_of(names);
      {
        Communicator communicator(group, {.warm_up_bytes = 0});
        GpuArrays whole(group, 4);
        GpuArrays part(group, 2);
        std::vector<Words> before(3, Words(4));
        std::vector<Words> after(3);
        std::vector<Words> parts(3);
        std::vector<const void*> inputs;
        std::vector<BufferView> in = whole.views();
        std::vector<BufferView> out = part.views();
        for (std::size_t d = 0; d < 3; ++d) {
          reference::fill(before[d].data(), 8, DType::bfloat16, random);
          whole.fill(d, before[d]);
          inputs.push_back(reinterpret_cast<const char*>(before[d].data()) + 2);
          in[d] = {static_cast<char*>(in[d].data) + 2, 3, DType::float32, in[d].stream};
          out[d] = {static_cast<char*>(out[d].data) + 2, 1, DType::float32, out[d].stream};
        }
        communicator.reduce_scatter(in, out, op);
        communicator.all_reduce(in, op);
        for (std::size_t d = 0; d < 3; ++d) whole.read(d, after[d]);
        for (std::size_t d = 0; d < 3; ++d) part.read(d, parts[d]);
        whole.wait();
        part.wait();
        for (std::size_t d = 0; d < 3; ++d) {
          const auto bits = [](const Words& words, std::size_t i) {
            return reference::bits_of(reinterpret_cast<const char*>(words.data()) + 2, i, DType::float32);
          };
          for (std::size_t i = 0; i < 3; ++i) {
            ASSERT_TRUE(reference::same(bits(after[d], i), reference::reduced_bits(inputs, i, DType::float32, op),
                                        DType::float32));
          }
          ASSERT_TRUE(reference::same(bits(parts[d], 0), reference::reduced_bits(inputs, d, DType::float32, op),
                                      DType::float32));
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_clean(nccl, 1));
    }
  }
}

TEST(CopyLink, LetsAnEndpointWriteItsMemoryAgainOnlyWhenAllOthersHaveReadIt) {
  constexpr std::size_t bytes = 16;
  for_each_order(kOrders, 2, [&](fake::Nccl&, std::uint64_t) {
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    std::vector<internal::Endpoint> endpoints;
    std::vector<std::unique_ptr<Buffer>> memory;
    internal::Piece piece;
    for (const Device& device : group.devices()) {
      const std::shared_ptr<AsyncDevice> opened = backend_of(device).open(device);
      endpoints.push_back({device, opened, opened->make_stream()});
      memory.push_back(opened->allocate(bytes, *endpoints.back().stream));
      piece.at.push_back(memory.back()->data());
    }
    const auto write = [&] {
      for (std::size_t r = 0; r < 2; ++r) endpoints[r].stream->zero(piece.at[r], bytes);
    };
    const std::unique_ptr<internal::Link> link = internal::make_copy_link(endpoints, "as asked for");
    write();
    link->broadcast({&piece, 1}, bytes);
    write();
    link->reduce({&piece, 1}, bytes / sizeof(float), DType::float32, ReduceOp::sum);
    write();
    for (const internal::Endpoint& endpoint : endpoints) {
      const std::unique_ptr<Event> event = endpoint.opened->make_event(false);
      endpoint.stream->record(*event);
      wait_for(*event);
    }
  });
}

TEST(CudaCommunicator, MeansOfHalfTypesHoldWhereTheirSumsWouldNot) {
  constexpr DType dtype = DType::float16;
  constexpr double number = 60000.0;  // of 65504 at most
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"cuda:0", "host:0", "host:1"},
        std::vector<std::string>{"host:0", "cuda:0/0", "cuda:0/1", "cuda:1", "host:1", "host:2"}}) {
    boot(1, 2);
    const DeviceGroup group = group_of(names);
    Communicator communicator(group, {.warm_up_bytes = 0});
    Words words(words_of(4, dtype));
    const std::uint64_t bits = reference::half_bits(static_cast<float>(number), 5, 10);
    for (std::size_t i = 0; i < 4; ++i) {
      std::memcpy(reinterpret_cast<char*>(words.data()) + i * size_of(dtype), &bits, size_of(dtype));
    }
    GpuArrays arrays(group, words.size());
    std::vector<BufferView> views = arrays.views();
    for (std::size_t d = 0; d < group.size(); ++d) {
      arrays.fill(d, words);
      views[d] = {views[d].data, 4, dtype, views[d].stream};
    }
    communicator.all_reduce(views, ReduceOp::mean);
    std::vector<Words> after(group.size());
    for (std::size_t d = 0; d < group.size(); ++d) arrays.read(d, after[d]);
    communicator.wait();
    arrays.wait();
    for (const Words& each : after) {
      for (std::size_t i = 0; i < 4; ++i) {
        ASSERT_NEAR(number_of(reference::bits_of(each.data(), i, dtype), dtype), number, 1e-2 * number);
      }
    }
  }
}

TEST(CudaCommunicator, TakesNoStreamForTheLegacyDefaultStream) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    Communicator communicator(group, {.warm_up_bytes = 0});
    GpuArrays arrays(group, 4);
    const Words ones(4, 1.0F);
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
    Words after;
    arrays.read(1, after);
    arrays.wait();
    EXPECT_EQ(after, Words(4, 2.0F));
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
  }
}

TEST(CudaCommunicator, GrowsWithItsBuffersAndHoldsNoThreadForIt) {
  boot(3, 2);
  const DeviceGroup group = group_of({"cuda:0", "host:0", "cuda:1"});
  Communicator communicator(group, {.transport = Transport::copies});
  for (const std::size_t count : {1U, 100U, 7U, 1000U, 100000U, 3U}) {
    GpuArrays arrays(group, count);
    const Words ones(count, 1.0F);
    std::vector<Words> after(3);
    for (std::size_t d = 0; d < 3; ++d) arrays.fill(d, ones);
    communicator.all_reduce(arrays.views());
    for (std::size_t d = 0; d < 3; ++d) arrays.read(d, after[d]);
    arrays.wait();
    for (std::size_t d = 0; d < 3; ++d) EXPECT_EQ(after[d], Words(count, 3.0F));
  }
  EXPECT_EQ(fake::synchronize_calls(), 0);
  ASSERT_EQ(fake::problems(), std::vector<std::string>{});
}

TEST(CudaCommunicator, SaysHowDataGetsAcross) {
  boot(1, 2);
  const auto description = [](const std::vector<std::string>& names, Transport transport) {
    return Communicator(group_of(names), {.transport = transport, .warm_up_bytes = 0}).description();
  };
  EXPECT_EQ(description({"cuda:0", "cuda:1"}, Transport::automatic),
            std::string("NCCL 2.30.7 (") + FAKE_NCCL_PATH + ")");
  EXPECT_EQ(description({"cuda:1", "cuda:0"}, Transport::copies),
            "copies through cuda:1 (as asked for), by PCIe peer access");
  EXPECT_EQ(description({"cuda:0/0", "cuda:0/1"}, Transport::nccl), "the memory of cuda:0");
  EXPECT_EQ(description({"host:0", "host:1"}, Transport::automatic), "the host's memory");
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// A trainer on GPUs that run out of memory or break, at every point that the seeds find.
#include <gtest/gtest.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>

#include "fake_cuda.hpp"
#include "gpu_training.hpp"
#include "orders.hpp"

namespace paceline {
namespace {

DataParallelOptions options_of(const Box& box, std::uint64_t seed) {
  return {.parameter_count = kWidth,
          .balance = seed % 2 == 0 ? Balance::automatic : Balance::even,
          .micro_batch = static_cast<std::int64_t>(seed % 3),
          .collectives = {.transport = box.transport, .warm_up_bytes = 64}};
}

class FailingGpus : public ::testing::TestWithParam<Box> {};

TEST_P(FailingGpus, RunOutOfMemoryAnywhereWhileATrainerIsMadeAndGiveEverythingBack) {
  constexpr std::uint64_t kMostAllocations = 50;
  std::uint64_t failed = 0;
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, GetParam().gpus);
    fake::fail_allocation(static_cast<int>(seed % kMostAllocations));
    std::optional<Trainer> trainer;
    bool out_of_memory = false;
    try {
      trainer.emplace(group_of(GetParam()), options_of(GetParam(), seed));
    } catch (const OutOfMemory& error) {
      out_of_memory = true;
      ASSERT_FALSE(std::string(error.what()).empty());
    }
    if (out_of_memory) {
      ++failed;
      make_whole(GetParam());
      ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
      trainer.emplace(group_of(GetParam()), options_of(GetParam(), seed));
      const double expected = Reference().step();
      ASSERT_NEAR(trainer->step(kBatch, body).value(), expected, 1e-12 * expected) << "seed " << seed;
    } else {
      ASSERT_GT(seed % kMostAllocations, 0U) << "the first allocation fails, and nobody says so";
    }
    trainer.reset();
    make_whole(GetParam());
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
  }
  EXPECT_LT(failed, kOrders) << "there are allocations that never failed here";
}

TEST_P(FailingGpus, BreakAtAnyTimeAndAreNamed) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, GetParam().gpus);
    const int broken = static_cast<int>(seed / 7) % GetParam().gpus;
    std::uint64_t calls = 0;
    std::mutex one_at_a_time;
    const auto breaking = [&](const MicroBatch& mb, Trainer::Replica& replica) {
      const std::lock_guard lock(one_at_a_time);
      if (calls++ == seed % 11) fake::poison(broken, cudaErrorIllegalAddress);
      if (replica.stream != nullptr && calls > seed % 11)
        return 0.0;  // a kernel of the user's fails, which is theirs to find
      return body(mb, replica);
    };
    {
      Trainer trainer(group_of(GetParam()), options_of(GetParam(), seed));
      std::string named;
      for (int step = 0; step < 20 && named.empty(); ++step) {
        try {
          trainer.step(kBatch, breaking);
        } catch (const Error& error) {
          named = error.device();
          ASSERT_EQ(named.substr(0, 6), "cuda:" + std::to_string(broken)) << "seed " << seed << ": " << error.what();
        }
      }
      ASSERT_FALSE(named.empty()) << "seed " << seed;
      EXPECT_THROW(trainer.step(kBatch, breaking), Error) << "it stays broken";
    }
    EXPECT_THROW(Trainer(group_of(GetParam()), options_of(GetParam(), seed)), Error);
    make_whole(GetParam());
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::driver_staged_copies(), 0) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, FailingGpus,
    ::testing::Values(
        Box{"OneGpu", 1, {"cuda:0"}}, Box{"Parts", 1, {"cuda:0/0", "cuda:0/1"}, {0.75, 0.25}},
        Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}}, Box{"Everything", 2, {"host:0", "cuda:0/0", "cuda:0/1", "cuda:1/0"}},
        Box{"EverythingByCopies", 2, {"host:0", "cuda:0/0", "cuda:0/1", "cuda:1/0"}, {}, Transport::copies}),
    [](const auto& param) { return param.param.name; });

TEST(CudaDataParallel, TrainsThroughTheHostWhereDirectCopiesArriveWrong) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (const bool both : {false, true}) {
      boot(seed, 2);
      fake::lie(1, 0);
      if (both) fake::lie(0, 1);
      {
        Reference reference;
        const DataParallelOptions options{.parameter_count = kWidth, .collectives = {.transport = Transport::copies}};
        Trainer trainer(group_of({"cuda:0", "cuda:1"}), options);
        for (int step = 0; step < 3; ++step) {
          const double expected = reference.step();
          ASSERT_NEAR(trainer.step(kBatch, body).value(), expected, 1e-12 * expected) << "seed " << seed;
          update(trainer);
        }
        const std::vector<double> parameters = fetched(trainer);
        for (std::size_t j = 0; j < kWidth; ++j) ASSERT_NEAR(parameters[j], reference.parameters[j], 1e-12) << seed;
      }
      ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    }
  }
}

TEST(CudaDataParallel, DoesNotLendNcclAPathThatDeliversWrongBytes) {
  boot(0, 2);
  fake::lie(0, 1);
  const DataParallelOptions options{.parameter_count = kWidth, .collectives = {.transport = Transport::nccl}};
  const auto refused = thrown_by<Unavailable>([&] { Trainer(group_of({"cuda:0", "cuda:1"}), options); });
  EXPECT_TRUE(says(refused, "cuda:0 and cuda:1")) << refused.what();
  EXPECT_TRUE(says(refused, "NCCL_P2P_DISABLE=1")) << refused.what();
  const Communicator communicator(group_of({"cuda:0", "cuda:1"}), {});
  EXPECT_TRUE(says(communicator.description(), "direct copies arrived wrong")) << communicator.description();
}

}  // namespace
}  // namespace paceline

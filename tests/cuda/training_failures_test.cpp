// SPDX-License-Identifier: Apache-2.0
//
// The training step on GPUs that run out of memory or break, and with an NCCL that is slow, old, broken or stuck.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>

#include "fake_cuda.hpp"
#include "gpu_training.hpp"
#include "helpers.hpp"
#include "nccl_host.hpp"
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
  for_each_order(kOrders, [&](std::uint64_t seed) {
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
      ASSERT_NEAR(trainer->step(kBatch, body).value(), expected, 1e-12 * expected);
    } else {
      ASSERT_GT(seed % kMostAllocations, 0U) << "the first allocation fails, and nobody says so";
    }
    trainer.reset();
    make_whole(GetParam());
  });
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

using std::chrono::milliseconds;

const Box kTwo{"TwoGpus", 2, {"cuda:0", "cuda:1"}};

// A time-out that the steps before the hang keep also on a machine that is busy with other things.
constexpr milliseconds kPatience{1000};

DataParallelOptions options_with(std::chrono::nanoseconds timeout) {
  return {.parameter_count = kWidth,
          .balance = Balance::even,
          .timeout = 2 * timeout,
          .collectives = {.transport = Transport::nccl, .timeout = timeout, .warm_up_bytes = 64}};
}

/// A trainer beside what it should have come to.
struct Bench {
  explicit Bench(const Box& box, std::chrono::nanoseconds timeout = std::chrono::minutes(1))
      : trainer(group_of(box), options_with(timeout)) {}

  void expect_right() {
    const double expected = reference.step();
    ASSERT_NEAR(trainer.step(kBatch, body).value(), expected, 1e-12 * expected);
    update(trainer);
  }
  void expect_right_in_the_end() {
    ASSERT_NO_FATAL_FAILURE(expect_right());
    const std::vector<double> parameters = fetched(trainer);
    for (std::size_t j = 0; j < kWidth; ++j) ASSERT_NEAR(parameters[j], reference.parameters[j], 1e-12);
  }

  Trainer trainer;
  Reference reference;
};

void expect_nothing_left(const fake::Nccl& nccl, std::uint64_t seed) {
  ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
  ASSERT_EQ(nccl.problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(nccl.communicators(), 0) << "seed " << seed;
}

TEST(StepCollectives, UseTheTrainersParametersInPlace) {
  fake::Nccl& nccl = boot(1, 2);
  {
    Bench bench(kTwo);
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    EXPECT_TRUE(nccl.used(bench.trainer.parameters().data(), bench.trainer.parameters().size_bytes()));
    EXPECT_TRUE(bench.trainer.explain().ends_with("Between GPUs: NCCL 2.30.7 (" FAKE_NCCL_PATH
                                                  "), after the devices' last work.\n"))
        << bench.trainer.explain();
  }
  ASSERT_NO_FATAL_FAILURE(expect_nothing_left(nccl, 1));
}

class FailingCall : public ::testing::TestWithParam<const char*> {};

TEST_P(FailingCall, NamesTheDeviceAndTheNextStepIsRight) {
  const std::string function = GetParam();
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    fake::Nccl& nccl = boot(seed, 3);
    {
      Bench bench({"", 3, {"cuda:0", "cuda:1", "cuda:2", "host:0"}});
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      const std::vector<double> before = fetched(bench.trainer);
      const bool one = function != "ncclGroupEnd";
      nccl.fail(function, one ? 1 : fake::Nccl::kAnyRank, nccl::kUnhandledCudaError);
      const auto error = thrown_by<Error>([&] { bench.trainer.step(kBatch, body); });
      ASSERT_TRUE(says(error, "unhandled cuda error (NCCL error 1)")) << error.what();
      if (one) {
        ASSERT_TRUE(says(error, "cuda:1: " + function + " failed")) << error.what();
        ASSERT_EQ(error.device(), "cuda:1") << error.what();
      }
      ASSERT_EQ(fetched(bench.trainer), before);
      ASSERT_EQ(fake::leftovers().queued, 0U) << "the user may take back what the step has used";
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      ASSERT_NO_FATAL_FAILURE(bench.expect_right_in_the_end());
      ASSERT_EQ(nccl.made(), 6);
      ASSERT_EQ(nccl.aborted(), 3);
    }
    ASSERT_NO_FATAL_FAILURE(expect_nothing_left(nccl, seed));
  }
}

INSTANTIATE_TEST_SUITE_P(StepCollectives, FailingCall, ::testing::Values("ncclBroadcast", "ncclReduce", "ncclGroupEnd"),
                         [](const auto& param) { return std::string(param.param); });

TEST(StepCollectives, AHangIsATimeoutThatDiscardsTheStepAndTheNextOneIsRight) {
  for (const char* const function : {"ncclBroadcast", "ncclReduce"}) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      fake::Nccl& nccl = boot(seed, 2);
      {
        Bench bench(kTwo, kPatience);
        ASSERT_NO_FATAL_FAILURE(bench.expect_right());
        nccl.hang(function);
        const auto error = thrown_by<Timeout>([&] { static_cast<void>(bench.trainer.step(kBatch, body).value()); });
        ASSERT_TRUE(says(error, std::string(function) + " did not end within 1 s")) << error.what();
        ASSERT_TRUE(says(error, "cuda:0") || says(error, "cuda:1")) << error.what();
        ASSERT_NO_FATAL_FAILURE(bench.expect_right());
        ASSERT_NO_FATAL_FAILURE(bench.expect_right_in_the_end());
        ASSERT_EQ(nccl.aborted(), 2);
      }
      ASSERT_NO_FATAL_FAILURE(expect_nothing_left(nccl, seed));
    }
  }
}

TEST(StepCollectives, WhatACommunicatorSaysInTheMiddleOfAStepDiscardsIt) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    fake::Nccl& nccl = boot(seed, 2);
    {
      Bench bench(kTwo);
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      nccl.hang("ncclBroadcast");
      const auto breaking = [&](const MicroBatch& mb, Trainer::Replica& replica) {
        nccl.break_rank(1, nccl::kRemoteError);
        return body(mb, replica);
      };
      const auto error = thrown_by<Error>([&] { static_cast<void>(bench.trainer.step(kBatch, breaking).value()); });
      ASSERT_TRUE(says(error, "NCCL error 6")) << error.what();
      ASSERT_EQ(error.device(), "cuda:1") << error.what();
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      ASSERT_NO_FATAL_FAILURE(bench.expect_right_in_the_end());
    }
    ASSERT_NO_FATAL_FAILURE(expect_nothing_left(nccl, seed));
  }
}

TEST(StepCollectives, AnObjectiveThatNobodyHasReadThrowsWhatTheNextStepFound) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    fake::Nccl& nccl = boot(seed, 2);
    Bench bench(kTwo, kPatience);
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
    nccl.hang("ncclReduce");
    const Objective first = bench.trainer.step(kBatch, body);
    thrown_by<Timeout>([&] {
      for (int k = 0; k < 3; ++k) bench.trainer.step(kBatch, body);
    });
    EXPECT_THROW(static_cast<void>(first.value()), Timeout) << "no number of a step that failed";
    ASSERT_NO_FATAL_FAILURE(bench.expect_right());
  }
}

TEST(StepCollectives, ACallThatNeverComesBackEndsTheTraining) {
  for (const char* const function : {"ncclBroadcast", "ncclReduce"}) {
    fake::Nccl& nccl = boot(1, 2);
    {
      Bench bench(kTwo, kPatience);
      ASSERT_NO_FATAL_FAILURE(bench.expect_right());
      nccl.hold(function, 1);
      const auto error = thrown_by<Error>([&] { bench.trainer.step(kBatch, body); });
      EXPECT_TRUE(says(error, std::string("cuda:1: NCCL did not come back from ") + function)) << error.what();
      EXPECT_EQ(error.device(), "cuda:1");
      const auto later = thrown_by<DeviceLost>([&] { bench.trainer.step(kBatch, body); });
      EXPECT_TRUE(says(later, "Start a new process")) << later.what();
    }
    EXPECT_EQ(nccl.inside(), 1) << "still there, and nobody waited for it";
    nccl.release();
    await_the_thread();  // the machine that it uses ends with the next boot()
  }
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// The training step over several GPUs with an NCCL that is slow, old, broken or stuck.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include <paceline/error.hpp>

#include "fake_cuda.hpp"
#include "gpu_training.hpp"
#include "helpers.hpp"
#include "nccl_host.hpp"
#include "orders.hpp"

namespace paceline {
namespace {

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

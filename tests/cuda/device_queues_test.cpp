// SPDX-License-Identifier: Apache-2.0
//
// Steps whose caller never waits, as the PyTorch trainer's: what orders them.
#include <paceline/engine/device_queues.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "helpers.hpp"
#include "interrupts.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"

namespace paceline {
namespace {

class Queued : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(Queued, StepsThatNobodyWaitsForAreExactAndTimedInTheEnd) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of(GetParam());
    StepLoop step_loop(group, {.balance = seed % 2 == 0 ? Balance::automatic : Balance::even,
                               .micro_batch = 1 + static_cast<int>(seed % 3)});
    const std::unique_ptr<Buffer> outputs = [&] {
      Summing any(group);
      return any.queues.maker(any.queues.home_space()).allocate_pinned(6 * sizeof(double));
    }();
    auto* const sums = static_cast<double*>(outputs->data());
    for (int k = 0; k < 6; ++k) {
      // A program of its own for each step, as the PyTorch trainer has: each may still be on its way.
      auto program = std::make_shared<Summing>(group, static_cast<std::int64_t>(seed % 2),
                                               seed % 3 == 0 ? Transport::nccl : Transport::copies);
      program->begin(1.0 + k, sums + k);
      const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program);
      step->wait();
      ASSERT_EQ(step->failure(), nullptr);
      step_loop.commit(step);
    }
    step_loop.settle();
    while (Counted::alive > 0) std::this_thread::yield();  // a worker that comes late lets go of its program late
    // Read here, because `outputs` is pinned memory of this test's. The host's programs have pinned memory, too.
    if (GetParam().front() != "host:0") {
      ASSERT_EQ(fake::synchronize_calls(), 0);
    }
    ASSERT_EQ(step_loop.metrics().steps, 6);
    for (int k = 0; k < 6; ++k) ASSERT_EQ(sums[k], (1.0 + k) * kBatch) << "seed " << seed << ", step " << k;
  });
}

TEST_P(Queued, OneStepFollowsTheOtherInTheSameMemory) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of(GetParam());
    StepLoop step_loop(group, {.balance = Balance::even, .micro_batch = 2});
    auto program =
        std::make_shared<Summing>(group, std::int64_t{1}, seed % 3 == 0 ? Transport::nccl : Transport::copies);
    const std::unique_ptr<Buffer> outputs =
        program->queues.maker(program->queues.home_space()).allocate_pinned(4 * sizeof(double));
    auto* const sums = static_cast<double*>(outputs->data());
    for (int k = 0; k < 4; ++k) {
      program->begin(1.0 + k, sums + k);
      const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program);
      step->wait();
      ASSERT_EQ(step->failure(), nullptr);
    }
    program->queues.drain();
    for (int k = 0; k < 4; ++k) ASSERT_EQ(sums[k], (1.0 + k) * kBatch) << "seed " << seed << ", step " << k;
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Queued,
                         ::testing::Values(std::vector<std::string>{"cuda:0"},
                                           std::vector<std::string>{"cuda:0/0", "cuda:0/1"},
                                           std::vector<std::string>{"cuda:0", "cuda:1"},
                                           std::vector<std::string>{"host:0", "cuda:1/0", "cuda:1/1", "cuda:0"}));

TEST(DeviceQueues, AStepThatCannotBeginLeavesNothingEnqueued) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
      const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
      DeviceQueues queues(group, {.collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
      const std::size_t home = queues.home_space();
      const std::unique_ptr<Buffer> from = queues.maker(home).allocate(64, queues.home_stream());
      const std::unique_ptr<Buffer> to = queues.maker(1 - home).allocate(64, *queues.copy_stream(1 - home));
      queues.home_stream().zero(from->data(), 64);
      fake::the_nccl().fail("ncclBroadcast", 1, nccl::kUnhandledCudaError);
      const SpaceCopy copies[] = {{1 - home, to->data(), from->data(), 64}};
      EXPECT_THROW(static_cast<void>(queues.begin_step(copies)), Error);
      ASSERT_EQ(fake::leftovers().queued, 0U) << "the caller may take its memory back, seed " << seed;
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
  }
}

TEST(DeviceQueues, ANewStreamComesAfterTheOldOne) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 1);
    cudaStream_t streams[2] = {};
    for (cudaStream_t& stream : streams)
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
      const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1"});
      StepLoop step_loop(group, {.balance = Balance::even});
      auto program = std::make_shared<Summing>(group);
      const std::unique_ptr<Buffer> outputs = program->queues.maker(0).allocate_pinned(4 * sizeof(double));
      auto* const sums = static_cast<double*>(outputs->data());
      for (int k = 0; k < 4; ++k) {
        program->queues.set_stream(streams[k % 2]);
        ASSERT_EQ(program->queues.home_stream().native(), streams[k % 2]);
        program->begin(1.0 + k, sums + k);
        step_loop.begin(step_loop.plan(kBatch), program)->wait();
      }
      program->queues.drain();
      for (int k = 0; k < 4; ++k) ASSERT_EQ(sums[k], (1.0 + k) * kBatch) << "seed " << seed;
    }
    for (cudaStream_t stream : streams) ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
  }
}

TEST(DeviceQueues, AStreamThatWasLeftMayBeDestroyed) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 1);
    cudaStream_t stream = nullptr;
    {
      const DeviceGroup group = group_of({"cuda:0", "host:0"});
      StepLoop step_loop(group, {.balance = Balance::even});
      auto program = std::make_shared<Summing>(group);
      const std::unique_ptr<Buffer> outputs = program->queues.maker(program->queues.home_space()).allocate_pinned(32);
      auto* const sums = static_cast<double*>(outputs->data());
      for (int k = 0; k < 4; ++k) {
        cudaStream_t const left = stream;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        program->queues.set_stream(stream);
        if (left != nullptr) {
          ASSERT_EQ(cudaStreamDestroy(left), cudaSuccess);
        }
        program->begin(1.0 + k, sums + k);
        step_loop.begin(step_loop.plan(kBatch), program)->wait();
      }
      program->queues.drain();
      for (int k = 0; k < 4; ++k) ASSERT_EQ(sums[k], (1.0 + k) * kBatch) << "seed " << seed;
    }
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
  }
}

TEST(DeviceQueues, GoOnlyWhenNothingIsEnqueuedAnyMore) {
  boot(1, 1);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  std::unique_ptr<Buffer> buffer;
  {
    DeviceQueues queues(group_of({"cuda:0"}), {.stream = stream});
    buffer = queues.maker(0).allocate(sizeof(double), queues.home_stream());
    queues.home_stream().zero(buffer->data(), sizeof(double));
    EXPECT_GT(fake::leftovers().queued, 0U);
  }
  EXPECT_EQ(fake::leftovers().queued, 0U);
}

void expect_drained_before(const std::function<void(DeviceQueues&)>& call) {
  boot(1, 1);
  const DeviceGroup group = group_of({"cuda:0"});
  DeviceQueues queues(group, {.timeout = std::chrono::milliseconds(300)});
  const auto output = queues.maker(0).allocate(sizeof(double), queues.home_stream());
  fake::hang(queues.home_stream().native());
  queues.home_stream().zero(output->data(), sizeof(double));
  {
    const Interrupting soon;
    EXPECT_THROW(queues.drain(), Interrupt);
  }
  EXPECT_THROW(call(queues), DeviceLost) << "it still hangs";
  fake::go_on(queues.home_stream().native());
}

TEST(DeviceQueues, WhatAnInterruptedDrainLeftIsDrainedBeforeTheNextStep) {
  expect_drained_before([](DeviceQueues& queues) { static_cast<void>(queues.begin_step({})); });
}

TEST(DeviceQueues, WhatAnInterruptedDrainLeftIsDrainedBeforeTheNextUpdate) {
  expect_drained_before([](DeviceQueues& queues) { queues.begin_update({}, {}); });
}

TEST(DeviceQueues, AHangIsATimeoutThatNamesTheDeviceAndEndsTheTraining) {
  for (const bool who_reads_finds_it : {true, false}) {
    boot(3, 2);
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    DeviceQueues queues(group, {.timeout = std::chrono::milliseconds(20)});
    fake::hang(queues.stream(1)->native());
    const std::shared_ptr<const StepTimes> times = queues.begin_step({});
    for (const DeviceId d : group.ids()) {
      queues.enter(d);
      queues.begin_run(d);
      queues.end_run(d);
      queues.deliver(d, {});
    }
    queues.reduce();
    queues.end_step();
    if (!who_reads_finds_it) queues.drain();
    EXPECT_THROW(times->wait(), Timeout);
    const auto error = thrown_by<DeviceLost>([&] { static_cast<void>(queues.begin_step({})); });
    EXPECT_TRUE(says(error, "new process"));
  }
}

TEST(DeviceQueues, AGroupOfTheHostAloneHasNone) {
  boot(0, 1);
  EXPECT_THROW(DeviceQueues(group_of({"host:0"}), {}), InvalidArgument);
}

}  // namespace
}  // namespace paceline

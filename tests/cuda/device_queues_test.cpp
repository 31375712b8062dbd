// SPDX-License-Identifier: Apache-2.0
//
// Steps and updates of parameters whose caller never waits, as the PyTorch trainer's: what orders them.
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

#include <paceline/engine/device_queues.hpp>
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

/// Four steps in the same memory, of which nobody waits for one. `before` is called before each of them begins.
void expect_four_steps(
    const DeviceGroup& group, const StepLoopOptions& options, const std::shared_ptr<Summing>& program,
    const std::function<void()>& before = [] {}) {
  StepLoop step_loop(group, options);
  const std::unique_ptr<Buffer> outputs =
      program->queues.maker(program->queues.home_space()).allocate_pinned(4 * sizeof(double));
  auto* const sums = static_cast<double*>(outputs->data());
  for (int k = 0; k < 4; ++k) {
    before();
    program->begin(1.0 + k, sums + k);
    const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program);
    step->wait();
    ASSERT_EQ(step->failure(), nullptr);
  }
  program->queues.drain();
  for (int k = 0; k < 4; ++k) ASSERT_EQ(sums[k], (1.0 + k) * kBatch) << "step " << k;
}

TEST_P(Queued, OneStepFollowsTheOtherInTheSameMemory) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
    const DeviceGroup group = group_of(GetParam());
    expect_four_steps(
        group, {.balance = Balance::even, .micro_batch = 2},
        std::make_shared<Summing>(group, std::int64_t{1}, seed % 3 == 0 ? Transport::nccl : Transport::copies));
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Queued,
                         ::testing::Values(std::vector<std::string>{"cuda:0"},
                                           std::vector<std::string>{"cuda:0/0", "cuda:0/1"},
                                           std::vector<std::string>{"cuda:0", "cuda:1"},
                                           std::vector<std::string>{"host:0", "cuda:1/0", "cuda:1/1", "cuda:0"}));

TEST(DeviceQueues, AStepThatCannotBeginLeavesNothingEnqueued) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
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
  });
}

TEST(DeviceQueues, ANewStreamComesAfterTheOldOne) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 1);
    cudaStream_t streams[2] = {};
    for (cudaStream_t& stream : streams)
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
      const DeviceGroup group = group_of({"cuda:0/0", "cuda:0/1"});
      const auto program = std::make_shared<Summing>(group);
      expect_four_steps(group, {.balance = Balance::even}, program, [&, k = 0]() mutable {
        cudaStream_t const stream = streams[k++ % 2];
        program->queues.set_stream(stream);
        ASSERT_EQ(program->queues.home_stream().native(), stream);
      });
    }
    for (cudaStream_t stream : streams) ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  });
}

TEST(DeviceQueues, AStreamThatWasLeftMayBeDestroyed) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 1);
    cudaStream_t stream = nullptr;
    {
      const DeviceGroup group = group_of({"cuda:0", "host:0"});
      const auto program = std::make_shared<Summing>(group);
      expect_four_steps(group, {.balance = Balance::even}, program, [&] {
        cudaStream_t const left = stream;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        program->queues.set_stream(stream);
        if (left != nullptr) {
          ASSERT_EQ(cudaStreamDestroy(left), cudaSuccess);
        }
      });
    }
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  });
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

constexpr std::size_t kUpdateBytes = kBatch * sizeof(double);

/// A parameter and its gradient at home, and where the device that updates it has them.
struct Updated {
  std::unique_ptr<Buffer> parameter, gradient, its_parameter, its_gradient;
};

class DeviceUpdates : public ::testing::TestWithParam<std::vector<std::string>> {};

/// In two rounds, of which each has parameters of its own.
TEST_P(DeviceUpdates, RunBetweenWhatTheCallerDoesBeforeAndAfter) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 3);
    {
      const DeviceGroup group = group_of(GetParam());
      DeviceQueues queues(group, {.collectives = {.transport = Transport::copies}});
      AsyncDevice& home = queues.maker(queues.home_space());
      std::vector<DeviceId> devices;
      constexpr std::size_t kRounds = 2;
      std::vector<Updated> updated(kRounds * group.size());
      std::vector<DeviceCopy> pulls[kRounds];
      std::vector<DeviceCopy> results[kRounds];
      for (std::size_t i = 0; i < updated.size(); ++i) {
        const DeviceId d = group.ids()[i % group.size()];
        const std::size_t round = i / group.size();
        if (queues.stream(d) == nullptr) continue;
        if (round == 0) devices.push_back(d);
        Updated& one = updated[i];
        one.parameter = home.allocate(sizeof(double), queues.home_stream());
        one.gradient = home.allocate(kUpdateBytes, queues.home_stream());
        queues.home_stream().zero(one.parameter->data(), sizeof(double));
        if (queues.space_of(d) == queues.home_space()) continue;
        AsyncDevice& maker = queues.maker(queues.space_of(d));
        one.its_parameter = maker.allocate(sizeof(double), *queues.stream(d));
        one.its_gradient = maker.allocate(kUpdateBytes, *queues.stream(d));
        pulls[round].push_back({d, one.its_parameter->data(), one.parameter->data(), sizeof(double)});
        pulls[round].push_back({d, one.its_gradient->data(), one.gradient->data(), kUpdateBytes});
        results[round].push_back({d, one.parameter->data(), one.its_parameter->data(), sizeof(double)});
      }
      constexpr std::size_t kSteps = 3;
      const std::unique_ptr<Buffer> seen = home.allocate_pinned(kSteps * updated.size() * sizeof(double));
      auto* const values = static_cast<double*>(seen->data());
      const auto gradient_of = [](std::size_t step, std::size_t i) { return static_cast<double>(1 + step + 10 * i); };
      for (std::size_t step = 0; step < kSteps; ++step) {
        ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
        for (std::size_t i = 0; i < updated.size(); ++i) {
          if (updated[i].gradient == nullptr) continue;
          launch(&fill_kernel, queues.home_stream(), static_cast<double*>(updated[i].gradient->data()),
                 gradient_of(step, i));
        }
        for (std::size_t round = 0; round < kRounds; ++round) {
          queues.begin_update(round == 0 ? devices : std::vector<DeviceId>{}, pulls[round]);
          for (const DeviceId d : devices) {
            const Updated& one = updated[round * group.size() + d.number()];
            const bool at_home = one.its_parameter == nullptr;
            ASSERT_EQ(cudaSetDevice(group.device(d).index), cudaSuccess);
            launch(&add_kernel, *queues.stream(d),
                   Add{static_cast<const double*>((at_home ? one.gradient : one.its_gradient)->data()), 0, kBatch,
                       static_cast<double*>((at_home ? one.parameter : one.its_parameter)->data())});
          }
          queues.end_update(devices, results[round]);
        }
        for (std::size_t i = 0; i < updated.size(); ++i) {
          if (updated[i].parameter == nullptr) continue;
          queues.home_stream().copy(values + (step * updated.size() + i), updated[i].parameter->data(), sizeof(double));
        }
      }
      queues.drain();
      for (std::size_t i = 0; i < updated.size(); ++i) {
        double expected = 0.0;
        for (std::size_t step = 0; updated[i].parameter != nullptr && step < kSteps; ++step) {
          expected += kBatch * gradient_of(step, i);
          ASSERT_EQ(values[step * updated.size() + i], expected) << "seed " << seed << ", parameter " << i;
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::synchronize_calls(), 0) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceUpdates,
                         ::testing::Values(std::vector<std::string>{"cuda:0", "cuda:1"},
                                           std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2"},
                                           std::vector<std::string>{"host:0", "cuda:0/0", "cuda:0/1", "cuda:1"}));

TEST(DeviceUpdates, AreRefusedAfterAHang) {
  boot(1, 2);
  {
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    DeviceQueues queues(group,
                        {.timeout = std::chrono::milliseconds(50), .collectives = {.transport = Transport::copies}});
    const std::vector<DeviceId> devices{0, 1};
    queues.begin_update(devices, {});
    queues.end_update(devices, {});
    const auto stream = queues.stream(1)->native();
    fake::hang(stream);
    queues.drain();
    EXPECT_THROW(queues.begin_update(devices, {}), DeviceLost);
    fake::go_on(stream);
  }
  ASSERT_EQ(fake::problems(), std::vector<std::string>{});
}

}  // namespace
}  // namespace paceline

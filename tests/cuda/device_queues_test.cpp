// SPDX-License-Identifier: Apache-2.0
//
// Steps whose caller never waits, as the PyTorch trainer's: what orders them.
#include <paceline/engine/device_queues.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "interrupts.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"

namespace paceline {
namespace {

class Queued : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(Queued, StepsThatNobodyWaitsForAreExactAndTimedInTheEnd) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
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
        ASSERT_EQ(fake::synchronize_calls(), 0) << "seed " << seed;
      }
      ASSERT_EQ(step_loop.metrics().steps, 6);
      for (int k = 0; k < 6; ++k) ASSERT_EQ(sums[k], (1.0 + k) * kBatch) << "seed " << seed << ", step " << k;
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

TEST_P(Queued, OneStepFollowsTheOtherInTheSameMemory) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
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
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, Queued,
                         ::testing::Values(std::vector<std::string>{"cuda:0"},
                                           std::vector<std::string>{"cuda:0/0", "cuda:0/1"},
                                           std::vector<std::string>{"cuda:0", "cuda:1"},
                                           std::vector<std::string>{"host:0", "cuda:1/0", "cuda:1/1", "cuda:0"}));

/// Parameters in memory of the caller's, as PyTorch's are, which NCCL's kernels must not be given.
void expect_staged(Transport transport, std::uint64_t seed) {
  constexpr std::size_t kPieces = 3;
  constexpr std::size_t kBytes = kBatch * sizeof(double);
  boot(seed, 3);
  // Without the host nobody waits for a step before the next one.
  const bool with_host = seed % 2 == 0;
  std::vector<std::string> names{"cuda:1", "cuda:0/0", "cuda:0/1", "cuda:2"};
  if (with_host) names.insert(names.begin(), "host:0");
  const DeviceGroup group = group_of(names);
  {
    // Room for less than one piece, and not for a whole number of them.
    DeviceQueues queues(group,
                        {.collectives = {.transport = transport, .warm_up_bytes = 64}, .staging_bytes = kBytes - 30});
    const std::size_t home = queues.home_space();
    std::vector<std::vector<std::unique_ptr<Buffer>>> parameters(queues.space_count());
    for (std::size_t s = 0; s < parameters.size(); ++s) {
      AsyncDevice& maker = queues.maker(s);
      Stream& stream = s == home ? queues.home_stream() : *queues.copy_stream(s);
      for (std::size_t k = 0; k < kPieces; ++k) {
        parameters[s].push_back(queues.on_host(s) ? maker.allocate_pinned(kBytes) : maker.allocate(kBytes, stream));
      }
    }
    std::vector<SpaceCopy> copies;
    for (std::size_t s = 0; s < parameters.size(); ++s) {
      for (std::size_t k = 0; s != home && k < kPieces; ++k) {
        copies.push_back({s, parameters[s][k]->data(), parameters[home][k]->data(), kBytes});
      }
    }
    std::vector<std::unique_ptr<Buffer>> sums;
    for (std::size_t d = 0; d < group.size(); ++d) {
      AsyncDevice& maker = queues.maker(queues.space_of(d));
      sums.push_back(queues.stream(d) == nullptr ? maker.allocate_pinned(kBytes)
                                                 : maker.allocate(kBytes, *queues.stream(d)));
    }
    AsyncDevice& first = queues.maker(home);
    const std::unique_ptr<Buffer> output = first.allocate(kBytes, queues.home_stream());
    const std::unique_ptr<Buffer> totals = first.allocate_pinned(kBatch * kBytes);
    constexpr std::size_t kSteps = 4;
    for (std::size_t step = 0; step < kSteps; ++step) {
      const std::size_t count = 1 + 2 * step;  // as when parameters are no longer frozen
      for (std::size_t k = 0; k < kPieces; ++k) {
        ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
        launch(&fill_kernel, queues.home_stream(), static_cast<double*>(parameters[home][k]->data()),
               static_cast<double>(step + 10 * k));
      }
      const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
      const BufferView outputs[] = {{output->data(), count, DType::float64}};
      queues.expect(outputs, 0.5);
      for (std::size_t d = 0; d < group.size(); ++d) {
        if (step == 2 && d + 1 == group.size()) continue;  // had no work
        queues.enter(d);
        queues.begin_run(d);
        auto* const sum = static_cast<double*>(sums[d]->data());
        if (queues.stream(d) == nullptr) std::fill(sum, sum + kBatch, 0.0);
        if (queues.stream(d) != nullptr) queues.stream(d)->zero(sum, kBytes);
        for (const std::unique_ptr<Buffer>& piece : parameters[queues.space_of(d)]) {
          const Add add{static_cast<const double*>(piece->data()), 0, kBatch, sum};
          if (queues.stream(d) != nullptr) {
            ASSERT_EQ(cudaSetDevice(group.devices()[d].index), cudaSuccess);
            launch(&add_kernel, *queues.stream(d), add);
          } else {
            for (std::int64_t i = 0; i < kBatch; ++i) *sum += add.batch[i];
          }
        }
        queues.end_run(d);
        queues.deliver(d, {{sum, count, DType::float64}});
      }
      queues.reduce();
      queues.home_stream().copy(static_cast<double*>(totals->data()) + step, output->data(), sizeof(double));
      queues.end_step();
      if (with_host) times->wait();  // its memory is written again by itself
    }
    queues.drain();
    for (std::size_t step = 0; step < kSteps; ++step) {
      const double each = kBatch * (3.0 * static_cast<double>(step) + 30.0);
      const auto devices = static_cast<double>(group.size() - (step == 2 ? 1 : 0));
      ASSERT_EQ(static_cast<const double*>(totals->data())[step], 0.5 * devices * each) << "seed " << seed;
    }
    for (const std::vector<std::unique_ptr<Buffer>>& of_space : parameters) {
      for (const std::unique_ptr<Buffer>& buffer : of_space) {
        ASSERT_FALSE(fake::the_nccl().used(buffer->data(), kBytes)) << "memory that other GPUs may not reach";
      }
    }
    ASSERT_EQ(fake::the_nccl().calls("ncclBroadcast") > 0, transport == Transport::nccl);
    for (std::size_t d = 0; d < group.size(); ++d) {
      if (queues.stream(d) == nullptr) sums[d].reset();
    }
  }
  ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(fake::the_nccl().problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
}

TEST(DeviceQueues, ParametersOfTheCallersReachEveryGpuThroughNccl) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) ASSERT_NO_FATAL_FAILURE(expect_staged(Transport::nccl, seed));
}

TEST(DeviceQueues, ParametersOfTheCallersReachEveryGpuByCopies) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) ASSERT_NO_FATAL_FAILURE(expect_staged(Transport::copies, seed));
}

TEST(DeviceQueues, StagingThatGrowsWaitsForWhatStillReadsIt) {
  constexpr std::size_t sizes[] = {64, 1024};
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
      const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
      DeviceQueues queues(group, {.collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
      std::unique_ptr<Buffer> buffers[2][2];
      for (std::size_t s = 0; s < 2; ++s) {
        Stream& stream = s == queues.home_space() ? queues.home_stream() : *queues.copy_stream(s);
        for (std::size_t k = 0; k < 2; ++k) buffers[s][k] = queues.maker(s).allocate(sizes[k], stream);
      }
      const std::size_t home = queues.home_space();
      for (std::size_t k = 0; k < 2; ++k) {  // the second at once, with more to send
        queues.home_stream().zero(buffers[home][k]->data(), sizes[k]);
        const SpaceCopy copies[] = {{1 - home, buffers[1 - home][k]->data(), buffers[home][k]->data(), sizes[k]}};
        const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
        queues.reduce();
        queues.end_step();
      }
      queues.drain();
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

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
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{});
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
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{});
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

TEST(DeviceQueues, WhatAnInterruptedDrainLeftIsDrainedBeforeTheNextStep) {
  boot(1, 1);
  const DeviceGroup group = group_of({"cuda:0"});
  DeviceQueues queues(group, {.timeout = std::chrono::milliseconds(300)});
  const auto output = queues.maker(0).allocate(sizeof(double), queues.home_stream());
  fake::hang(static_cast<cudaStream_t>(queues.home_stream().native()));
  queues.home_stream().zero(output->data(), sizeof(double));
  {
    const Interrupting soon;
    EXPECT_THROW(queues.drain(), Interrupt);
  }
  EXPECT_THROW(static_cast<void>(queues.begin_step({})), DeviceLost) << "it still hangs";
  fake::go_on(static_cast<cudaStream_t>(queues.home_stream().native()));
}

TEST(DeviceQueues, AHangIsATimeoutThatNamesTheDeviceAndEndsTheTraining) {
  boot(3, 2);
  const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
  DeviceQueues queues(group, {.timeout = std::chrono::milliseconds(20)});
  fake::hang(static_cast<cudaStream_t>(queues.stream(1)->native()));
  const std::shared_ptr<const StepTimes> times = queues.begin_step({});
  for (std::size_t d = 0; d < 2; ++d) {
    queues.enter(d);
    queues.begin_run(d);
    queues.end_run(d);
    queues.deliver(d, {});
  }
  queues.reduce();
  queues.end_step();
  EXPECT_THROW(times->wait(), Timeout);
  queues.drain();
  try {
    static_cast<void>(queues.begin_step({}));
    FAIL();
  } catch (const DeviceLost& error) {
    EXPECT_NE(std::string(error.what()).find("new process"), std::string::npos);
  }
}

TEST(DeviceQueues, ByCopiesNobodyWaitsForAGpuThatStaysOutOfTheStep) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
      const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
      DeviceQueues queues(group, {.timeout = std::chrono::seconds(5), .collectives = {.transport = Transport::copies}});
      constexpr std::size_t kBytes = kBatch * sizeof(double);
      const std::unique_ptr<Buffer> from = queues.maker(0).allocate(kBytes, queues.home_stream());
      const std::unique_ptr<Buffer> to = queues.maker(1).allocate(kBytes, *queues.copy_stream(1));
      const std::unique_ptr<Buffer> seen = queues.maker(0).allocate_pinned(kBytes);
      const SpaceCopy copies[] = {{1, to->data(), from->data(), kBytes}};
      const auto step = [&](double value, bool both) {
        launch(&fill_kernel, queues.home_stream(), static_cast<double*>(from->data()), value);
        const std::shared_ptr<const StepTimes> times = queues.begin_step(copies, {true, both});
        for (std::size_t d = 0; d < (both ? 2U : 1U); ++d) {
          queues.enter(d);
          if (d == 1) queues.stream(d)->copy(seen->data(), to->data(), kBytes);
          queues.deliver(d, {});
        }
        queues.reduce();
        queues.end_step();
        times->wait();
      };
      const auto copying = static_cast<cudaStream_t>(queues.copy_stream(1)->native());
      fake::hang(copying);
      for (int k = 0; k < 3; ++k) ASSERT_NO_THROW(step(k, false)) << "seed " << seed;
      fake::go_on(copying);
      step(7.0, true);
      ASSERT_EQ(*static_cast<const double*>(seen->data()), 7.0) << "seed " << seed;
      queues.drain();
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

TEST(DeviceQueues, ADeviceWaitsOnlyForTheParametersThatItNeeds) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    {
      const DeviceGroup group = group_of({"cuda:0", "cuda:1", "host:0"});
      DeviceQueues queues(group, {.collectives = {.transport = Transport::copies}});
      constexpr std::size_t kBytes = kBatch * sizeof(double);
      AsyncDevice& home = queues.maker(0);
      std::vector<std::unique_ptr<Buffer>> from;
      std::vector<std::unique_ptr<Buffer>> there;
      std::vector<std::unique_ptr<Buffer>> on_host;
      std::vector<SpaceCopy> copies;
      for (std::size_t bucket = 0; bucket < 2; ++bucket) {
        from.push_back(home.allocate(kBytes, queues.home_stream()));
        there.push_back(queues.maker(1).allocate(kBytes, *queues.copy_stream(1)));
        on_host.push_back(home.allocate_pinned(kBytes));
        copies.push_back({1, there[bucket]->data(), from[bucket]->data(), kBytes, bucket});
        copies.push_back({2, on_host[bucket]->data(), from[bucket]->data(), kBytes, bucket});
      }
      const std::unique_ptr<Buffer> sum = queues.maker(1).allocate(sizeof(double), *queues.stream(1));
      const std::unique_ptr<Buffer> seen = home.allocate_pinned(sizeof(double));
      for (int step = 0; step < 3; ++step) {
        for (std::size_t bucket = 0; bucket < 2; ++bucket) {
          ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
          launch(&fill_kernel, queues.home_stream(), static_cast<double*>(from[bucket]->data()),
                 1.0 + step + 10.0 * static_cast<double>(bucket));
        }
        const auto copying = static_cast<cudaStream_t>(queues.copy_stream(1)->native());
        if (step == 1) fake::hang(copying);
        const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
        ASSERT_TRUE(queues.enter(1, false));
        queues.stream(1)->zero(sum->data(), sizeof(double));  // needs none
        if (step == 1) {
          const std::unique_ptr<Event> zeroed = queues.maker(1).make_event(false);
          queues.stream(1)->record(*zeroed);
          ASSERT_NO_THROW(wait_for(*zeroed, std::chrono::seconds(30))) << "seed " << seed;
          fake::go_on(copying);
        }
        ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
        for (std::size_t bucket = 0; bucket < 2; ++bucket) {
          queues.need(1, bucket);
          launch(&add_kernel, *queues.stream(1),
                 Add{static_cast<const double*>(there[bucket]->data()), 0, kBatch, static_cast<double*>(sum->data())});
        }
        queues.stream(1)->copy(seen->data(), sum->data(), sizeof(double));
        queues.deliver(1, {});
        queues.enter(2, false);
        for (std::size_t bucket = 0; bucket < 2; ++bucket) {
          queues.need(2, bucket);
          ASSERT_EQ(*static_cast<const double*>(on_host[bucket]->data()),
                    1.0 + step + 10.0 * static_cast<double>(bucket));
        }
        queues.deliver(2, {});
        queues.reduce();
        queues.end_step();
        times->wait();
        ASSERT_EQ(*static_cast<const double*>(seen->data()), kBatch * (12.0 + 2.0 * step)) << "seed " << seed;
      }
      queues.drain();
      on_host.clear();
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

TEST(DeviceQueues, AGroupOfTheHostAloneHasNone) {
  boot(0, 1);
  EXPECT_THROW(DeviceQueues(group_of({"host:0"}), {}), InvalidArgument);
}

}  // namespace
}  // namespace paceline

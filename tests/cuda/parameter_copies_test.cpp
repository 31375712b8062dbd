// SPDX-License-Identifier: Apache-2.0
//
// How parameters come to the memory spaces, and what waits for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"

namespace paceline {
namespace {

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
    for (const DeviceId d : group.ids()) {
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
      for (const DeviceId d : group.ids()) {
        if (step == 2 && d == group.ids().back()) continue;  // had no work
        queues.enter(d);
        queues.begin_run(d);
        auto* const sum = static_cast<double*>(sums[d.number()]->data());
        if (queues.stream(d) == nullptr) std::fill(sum, sum + kBatch, 0.0);
        if (queues.stream(d) != nullptr) queues.stream(d)->zero(sum, kBytes);
        for (const std::unique_ptr<Buffer>& piece : parameters[queues.space_of(d)]) {
          const Add add{static_cast<const double*>(piece->data()), 0, kBatch, sum};
          if (queues.stream(d) != nullptr) {
            ASSERT_EQ(cudaSetDevice(group.device(d).index), cudaSuccess);
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
    for (const DeviceId d : group.ids()) {
      if (queues.stream(d) == nullptr) sums[d.number()].reset();
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
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
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
  });
}

TEST(DeviceQueues, ByCopiesNobodyWaitsForAGpuThatStaysOutOfTheStep) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
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
      for (const DeviceId d : std::span(group.ids()).first(both ? 2 : 1)) {
        queues.enter(d);
        if (d == 1) queues.stream(d)->copy(seen->data(), to->data(), kBytes);
        queues.deliver(d, {});
      }
      queues.reduce();
      queues.end_step();
      times->wait();
    };
    const auto copying = queues.copy_stream(1)->native();
    fake::hang(copying);
    for (int k = 0; k < 3; ++k) ASSERT_NO_THROW(step(k, false));
    fake::go_on(copying);
    step(7.0, true);
    ASSERT_EQ(*static_cast<const double*>(seen->data()), 7.0);
    queues.drain();
  });
}

TEST(DeviceQueues, ADeviceWaitsOnlyForTheParametersThatItNeeds) {
  for_each_order(kOrders, [&](std::uint64_t seed) {
    boot(seed, 2);
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
      const auto copying = queues.copy_stream(1)->native();
      if (step == 1) fake::hang(copying);
      const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
      ASSERT_TRUE(queues.enter(1, false));
      queues.stream(1)->zero(sum->data(), sizeof(double));  // needs none
      if (step == 1) {
        const std::unique_ptr<Event> zeroed = queues.maker(1).make_event(false);
        queues.stream(1)->record(*zeroed);
        ASSERT_NO_THROW(wait_for(*zeroed, std::chrono::seconds(30)));
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
      ASSERT_EQ(*static_cast<const double*>(seen->data()), kBatch * (12.0 + 2.0 * step));
    }
    queues.drain();
    on_host.clear();
  });
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// Devices that update parts of the parameters between two steps: what orders them.
#include <paceline/engine/device_queues.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "helpers.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"

namespace paceline {
namespace {

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

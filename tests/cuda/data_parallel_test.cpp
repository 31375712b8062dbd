// SPDX-License-Identifier: Apache-2.0
//
// The training step on GPUs: the gradient of one device, whatever order the fake runs things in.
#include <paceline/engine/data_parallel.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/partition.hpp>

#include "fake_cuda.hpp"
#include "orders.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

using Trainer = BasicDataParallel<double>;

constexpr std::size_t kWidth = 5;
constexpr std::int64_t kBatch = 24;

/// Item k: half the squared distance between the parameters and a point of its own.
double point(std::int64_t item, std::size_t j) {
  return std::sin(static_cast<double>(item) * 3.1 + static_cast<double>(j));
}

double add_gradients(std::int64_t begin, std::int64_t end, const double* parameters, double* gradients) {
  double loss = 0.0;
  for (std::int64_t item = begin; item < end; ++item) {
    for (std::size_t j = 0; j < kWidth; ++j) {
      const double distance = parameters[j] - point(item, j);
      loss += distance * distance / 2;
      gradients[j] += distance;
    }
  }
  return loss;
}

struct Work {
  std::int64_t begin;
  std::int64_t end;
  const double* parameters;
  double* gradients;
  double* loss;
  double seconds;
};

// Kernels of the user: their addresses are all that a launch needs here.
void backward_kernel(Work) {}
void update_kernel(double*, const double*) {}

std::atomic<int> in_flight{0};
std::atomic<int> most_in_flight{0};

void boot(std::uint64_t seed, int device_count) {
  fake::boot({.seed = seed, .device_count = device_count});
  fake::set_twins();
  in_flight = 0;
  most_in_flight = 0;
  fake::twin(&backward_kernel, [](const fake::Launch&, const Work& work) {
    fake::reads(work.parameters, kWidth * sizeof(double));
    fake::writes(work.gradients, kWidth * sizeof(double));
    fake::writes(work.loss, sizeof(double));
    fake::takes(work.seconds);
    *work.loss += add_gradients(work.begin, work.end, work.parameters, work.gradients);
    --in_flight;
  });
  fake::twin(&update_kernel, [](const fake::Launch&, double* parameters, const double* gradients) {
    fake::reads(gradients, kWidth * sizeof(double));
    fake::writes(parameters, kWidth * sizeof(double));
    for (std::size_t j = 0; j < kWidth; ++j) parameters[j] -= 0.5 * gradients[j];
  });
}

double body(const MicroBatch& mb, Trainer::Replica& replica) {
  if (replica.stream == nullptr) {
    return add_gradients(mb.begin, mb.end, replica.parameters.data(), replica.gradients.data());
  }
  const double speed = replica.device_index == 0 ? 1.0 : 0.5;
  Work work{mb.begin,
            mb.end,
            replica.parameters.data(),
            replica.gradients.data(),
            replica.loss_sum,
            1e-3 * static_cast<double>(mb.size()) / speed};
  void* arguments[] = {&work};
  const int now = ++in_flight;
  most_in_flight = std::max(most_in_flight.load(), now);
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&backward_kernel), dim3(1), dim3(1), arguments, 0,
                             static_cast<cudaStream_t>(replica.stream)),
            cudaSuccess);
  return 0.0;
}

void update(Trainer& trainer) {
  double* parameters = trainer.parameters().data();
  const double* gradients = trainer.gradients().data();
  void* arguments[] = {&parameters, &gradients};
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&update_kernel), dim3(1), dim3(1), arguments, 0,
                             static_cast<cudaStream_t>(trainer.stream())),
            cudaSuccess);
}

/// What the parameters are, once everything has run.
std::vector<double> fetched(Trainer& trainer) {
  const auto stream = static_cast<cudaStream_t>(trainer.stream());
  void* host = nullptr;
  EXPECT_EQ(cudaHostAlloc(&host, kWidth * sizeof(double), 0), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(host, trainer.parameters().data(), kWidth * sizeof(double), cudaMemcpyDefault, stream),
            cudaSuccess);
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
  }
  const auto* values = static_cast<const double*>(host);
  const std::vector<double> result(values, values + kWidth);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
  return result;
}

struct Reference {
  std::vector<double> parameters = std::vector<double>(kWidth, 0.0);

  double step() {
    std::vector<double> gradients(kWidth, 0.0);
    const double loss = add_gradients(0, kBatch, parameters.data(), gradients.data());
    for (std::size_t j = 0; j < kWidth; ++j) parameters[j] -= 0.5 * gradients[j] / static_cast<double>(kBatch);
    return loss / static_cast<double>(kBatch);
  }
};

struct Box {
  const char* name;
  int gpus;
  std::vector<std::string> devices;
  std::vector<double> fractions{};  ///< of each GPU that is split
};

void PrintTo(const Box& box, std::ostream* out) { *out << box.name; }

/// Without fractions "cuda:0/1" stands for a second queue of the whole cuda:0.
DeviceGroup group_of(const Box& box) {
  if (!box.fractions.empty()) {
    for (int gpu = 0; gpu < box.gpus; ++gpu) {
      static_cast<void>(partition("cuda:" + std::to_string(gpu), box.fractions));
    }
    return DeviceGroup(box.devices);
  }
  std::vector<Device> devices;
  for (const std::string& name : box.devices) {
    const auto slash = name.find('/');
    devices.push_back(find_device(name.substr(0, slash)));
    devices.back().name = name;
  }
  return DeviceGroup(devices);
}

void make_whole(const Box& box) {
  for (int gpu = 0; gpu < box.gpus; ++gpu) release_partitions("cuda:" + std::to_string(gpu));
}

void expect_clean(std::uint64_t seed) {
  const std::vector<std::string> problems = fake::problems();
  ASSERT_TRUE(problems.empty()) << "seed " << seed << ": " << problems.front();
}

class OnGpus : public ::testing::TestWithParam<Box> {};

TEST_P(OnGpus, TrainsAsOneDeviceWhateverTheOrder) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, GetParam().gpus);
    int synchronize_calls_of_the_test = 0;
    {
      Reference reference;
      DataParallelOptions options{.parameter_count = kWidth};
      options.balance = seed % 3 == 0 ? "auto" : "even";
      options.micro_batch = static_cast<std::int64_t>(seed % 4);
      options.run_ahead = static_cast<std::int64_t>(seed % 2);
      Trainer trainer(group_of(GetParam()), options);
      for (int step = 0; step < 4; ++step) {
        const double expected = reference.step();
        const double loss = trainer.step(kBatch, body);
        ASSERT_NEAR(loss, expected, 1e-12 * expected) << "seed " << seed << ", step " << step;
        update(trainer);
        ASSERT_LE(most_in_flight.load(), static_cast<int>(GetParam().devices.size()) * (1 + options.run_ahead));
      }
      ASSERT_EQ(fake::synchronize_calls(), 0) << "seed " << seed;
      const std::vector<double> parameters = fetched(trainer);
      synchronize_calls_of_the_test = fake::synchronize_calls();
      for (std::size_t j = 0; j < kWidth; ++j) ASSERT_NEAR(parameters[j], reference.parameters[j], 1e-12) << seed;
    }
    make_whole(GetParam());
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
    ASSERT_EQ(fake::synchronize_calls(), synchronize_calls_of_the_test) << "seed " << seed;
  }
}

TEST_P(OnGpus, AFailedStepLeavesNothingRunningAndTheNextOneIsRight) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, GetParam().gpus);
    {
      Reference reference;
      Trainer trainer(group_of(GetParam()), {.parameter_count = kWidth, .balance = "even", .micro_batch = 2});
      EXPECT_THROW(trainer.step(kBatch,
                                [](const MicroBatch& mb, Trainer::Replica& replica) {
                                  const double loss = body(mb, replica);
                                  if (mb.end == kBatch) throw std::runtime_error("no");
                                  return loss;
                                }),
                   Error);
      ASSERT_EQ(fake::leftovers().queued, 0U) << "the user may take back what the step has used";
      const double expected = reference.step();
      ASSERT_NEAR(trainer.step(kBatch, body), expected, 1e-12 * expected);
    }
    make_whole(GetParam());
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, OnGpus,
    ::testing::Values(Box{"OneGpu", 1, {"cuda:0"}}, Box{"TwoPartitions", 1, {"cuda:0/0", "cuda:0/1"}},
                      Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}}, Box{"GpuAndHost", 1, {"cuda:0", "host:0", "host:1"}},
                      Box{"Everything", 2, {"host:0", "cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1"}}),
    [](const auto& param) { return param.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Parts, OnGpus,
    ::testing::Values(Box{"TwoEqual", 1, {"cuda:0/0", "cuda:0/1"}, {0.5, 0.5}},
                      Box{"TwoUnequal", 1, {"cuda:0/0", "cuda:0/1"}, {0.75, 0.25}},
                      Box{"Four", 1, {"cuda:0/0", "cuda:0/1", "cuda:0/2", "cuda:0/3"}, {0.4, 0.3, 0.2, 0.1}},
                      Box{"PartsAndHost", 1, {"cuda:0/1", "host:0", "cuda:0/0"}, {0.6, 0.4}},
                      Box{"PartsOfTwoGpus", 2, {"cuda:0/1", "cuda:1/0", "host:0", "cuda:1/1"}, {0.5, 0.25}}),
    [](const auto& param) { return param.param.name; });

TEST(CudaDataParallel, LearnsSpeedsFromTheDevicesClocks) {
  boot(1, 2);
  Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}), {.parameter_count = kWidth});
  for (int step = 0; step < 30; ++step) {
    trainer.step(96, body);
    update(trainer);
  }
  EXPECT_NEAR(static_cast<double>(trainer.shares()[0]), 64.0, 6.0);  // twice as fast
}

TEST(CudaDataParallel, TakesTheCallersStream) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 1);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
      Trainer trainer(group_of({"", 1, {"cuda:0/0", "cuda:0/1"}}), {.parameter_count = kWidth, .stream = stream});
      EXPECT_EQ(trainer.stream(), stream);
      Reference reference;
      for (int step = 0; step < 3; ++step) {
        const double expected = reference.step();
        ASSERT_NEAR(trainer.step(kBatch, body), expected, 1e-12 * expected);
        update(trainer);
      }
      fetched(trainer);
    }
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{});
  }
}

TEST(CudaDataParallel, AFailedStepAlsoEndsWhatItBeganForDevicesWithoutWork) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}),
                    {.parameter_count = kWidth, .balance = "weighted", .weights = {1.0, 0.0}});
    EXPECT_THROW(
        trainer.step(kBatch, [](const MicroBatch&, Trainer::Replica&) -> double { throw std::runtime_error("no"); }),
        Error);
    ASSERT_EQ(fake::leftovers().queued, 0U) << "seed " << seed;
  }
}

TEST(CudaDataParallel, GoesWithoutHoldingTheThreadInTheMiddleOfWork) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 1);
    {
      Trainer trainer(group_of({"", 1, {"cuda:0"}}), {.parameter_count = kWidth});
      trainer.step(kBatch, body);
      for (int k = 0; k < 20; ++k) update(trainer);
    }
    ASSERT_EQ(fake::synchronize_calls(), 0) << "seed " << seed << ": pinned memory was given back while work ran";
    ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{});
  }
}

TEST(CudaDataParallel, SaysThatTheDeviceHasNoMemory) {
  fake::boot({.memory_bytes = 4096});
  fake::set_twins();
  EXPECT_THROW(Trainer(group_of({"", 1, {"cuda:0"}}), {.parameter_count = 1000}), OutOfMemory);
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(CudaDataParallel, NamesTheDeviceThatBroke) {
  boot(2, 2);
  Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}), {.parameter_count = kWidth});
  trainer.step(kBatch, body);
  fake::poison(1, cudaErrorIllegalAddress);
  try {
    trainer.step(kBatch, [](const MicroBatch&, Trainer::Replica&) { return 0.0; });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.device(), "cuda:1") << error.what();
  }
}

}  // namespace
}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// The C++ trainer on a GPU, whole and in parts: the gradient of one device whatever the split, and whatever is late.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>

#include "pool.hpp"
#include "support/boxes.hpp"
#include "support/kernels.hpp"

namespace paceline {
namespace {

using gpu_test::Box;
using Trainer = BasicDataParallel<double>;

constexpr std::size_t kWidth = 1000;
constexpr std::int64_t kBatch = 96;
constexpr unsigned long long kDelayNanoseconds = 3'000'000;  // long against everything else of a step

double add_gradients(std::int64_t begin, std::int64_t end, const double* parameters, double* gradients) {
  double loss = 0.0;
  for (std::int64_t item = begin; item < end; ++item) {
    for (std::size_t j = 0; j < kWidth; ++j) {
      const double distance = parameters[j] - gpu_test::point(item, j);
      loss += distance * distance / 2;
      gradients[j] += distance;
    }
  }
  return loss;
}

/// One device, without paceline.
struct Reference {
  std::vector<double> parameters = std::vector<double>(kWidth, 0.0);

  double step() {
    std::vector<double> gradients(kWidth, 0.0);
    const double loss = add_gradients(0, kBatch, parameters.data(), gradients.data());
    for (std::size_t j = 0; j < kWidth; ++j) {
      parameters[j] -= gpu_test::kLearningRate * gradients[j] / static_cast<double>(kBatch);
    }
    return loss / static_cast<double>(kBatch);
  }
};

void delay(NativeStream stream) {
  ASSERT_EQ(gpu_test::launch(&gpu_test::paceline_test_delay, stream, 1, kDelayNanoseconds), cudaSuccess);
}

/// Where something takes long. Only a host device, which has no stream, sleeps.
struct Delays {
  bool before_step = false;
  bool before_update = false;
  int before_backward = -1;  ///< on this device of the group
  int after_backward = -1;
  NativeStream reduction = nullptr;  ///< the stream that reduces, while the first device computes
};

Trainer::Body body_with(const Delays& delays) {
  return [delays](const MicroBatch& mb, Trainer::Replica& replica) {
    const auto late = [&](int device) {
      if (device != static_cast<int>(replica.device.number())) return;
      if (replica.stream == nullptr) std::this_thread::sleep_for(std::chrono::nanoseconds(kDelayNanoseconds));
      if (replica.stream != nullptr) delay(replica.stream);
    };
    if (replica.stream == nullptr) {
      late(delays.before_backward);
      return add_gradients(mb.begin, mb.end, replica.parameters.data(), replica.gradients.data());
    }
    late(delays.before_backward);
    const gpu_test::Work work{mb.begin,
                              mb.end,
                              replica.parameters.data(),
                              replica.gradients.data(),
                              replica.loss_sum,
                              replica.parameters.size()};
    EXPECT_EQ(gpu_test::launch(&gpu_test::paceline_test_backward, replica.stream, kWidth, work), cudaSuccess);
    late(delays.after_backward);
    if (delays.reduction != nullptr && replica.device == 0) delay(delays.reduction);
    return 0.0;
  };
}

void update(Trainer& trainer) {
  EXPECT_EQ(gpu_test::launch(&gpu_test::paceline_test_update, trainer.stream(), kWidth, trainer.parameters().data(),
                             static_cast<const double*>(trainer.gradients().data()), kWidth),
            cudaSuccess);
}

/// What the parameters are, once everything has run.
std::vector<double> fetched(Trainer& trainer) {
  const auto stream = trainer.stream();
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

/// Steps of `trainer` are those of one device.
void expect_equal_steps(Trainer& trainer, const Delays& delays, int steps) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  Reference reference;
  const Trainer::Body body = body_with(delays);
  for (int step = 0; step < steps; ++step) {
    const double expected = reference.step();
    if (delays.before_step) delay(trainer.stream());
    ASSERT_NEAR(trainer.step(kBatch, body).value(), expected, 1e-12 * expected) << "step " << step;
    if (delays.before_update) delay(trainer.stream());
    update(trainer);
  }
  const std::vector<double> parameters = fetched(trainer);
  for (std::size_t j = 0; j < kWidth; ++j) ASSERT_NEAR(parameters[j], reference.parameters[j], 1e-12) << j;
}

/// Memory that a stream frees is back once the stream has come there.
std::size_t bytes_left(const cuda::Pool& pool) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  while (pool.bytes_in_use() > 0 && std::chrono::steady_clock::now() < deadline) {
    static_cast<void>(cudaStreamQuery(stream));
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  return pool.bytes_in_use();
}

class OnAGpu : public gpu_test::NeedsGpu, public ::testing::WithParamInterface<Box> {
 protected:
  void SetUp() override {
    NeedsGpu::SetUp();
    if (IsSkipped()) return;
    try {
      devices_ = gpu_test::devices_of(GetParam());
    } catch (const Unavailable& error) {
      GTEST_SKIP() << error.what();
    }
    pool_ = cuda::Pool::of(0);  // held, so that it is the one that the trainers take from
  }
  void TearDown() override {
    if (pool_ != nullptr) {
      EXPECT_EQ(bytes_left(*pool_), 0U) << "memory that was not given back";
      pool_.reset();
    }
    if (!devices_.empty()) release_partitions("cuda:0");
  }

  std::vector<Device> devices_;
  std::shared_ptr<cuda::Pool> pool_;
};

TEST_P(OnAGpu, TrainsAsOneDeviceForRandomSplits) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 40; ++round) {
    DataParallelOptions options{.parameter_count = kWidth};
    options.balance = std::array{Balance::automatic, Balance::even, Balance::weighted}[random() % 3];
    if (options.balance == Balance::weighted) {
      options.weights.resize(devices_.size());
      for (double& weight : options.weights) weight = static_cast<double>(random() % 4);
      options.weights[random() % devices_.size()] += 1.0;
    }
    options.micro_batch = static_cast<std::int64_t>(random() % 4) * 7;
    options.run_ahead = static_cast<std::int64_t>(random() % 3);
    Trainer trainer(DeviceGroup(devices_), options);
    ASSERT_NO_FATAL_FAILURE(expect_equal_steps(trainer, {}, 4)) << "round " << round;
  }
}

TEST_P(OnAGpu, TrainsAsOneDeviceWithADelayInEveryPlace) {
  std::vector<Delays> places = {{.before_step = true}, {.before_update = true}};
  for (int device = 0; device < static_cast<int>(devices_.size()); ++device) {
    places.push_back({.before_backward = device});
    places.push_back({.after_backward = device});
  }
  for (std::size_t place = 0; place < places.size(); ++place) {
    Trainer trainer(DeviceGroup(devices_), {.parameter_count = kWidth, .balance = Balance::even, .micro_batch = 12});
    ASSERT_NO_FATAL_FAILURE(expect_equal_steps(trainer, places[place], 4)) << "place " << place;
  }
  Trainer trainer(DeviceGroup(devices_), {.parameter_count = kWidth, .balance = Balance::even, .micro_batch = 12});
  ASSERT_NO_FATAL_FAILURE(expect_equal_steps(trainer, {.reduction = trainer.stream()}, 4)) << "the reduction";
}

TEST_P(OnAGpu, TakesNoMoreMemoryAfterAThousandSteps) {
  Trainer trainer(DeviceGroup(devices_), {.parameter_count = kWidth, .micro_batch = 20});
  const Trainer::Body body = body_with({});
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  std::size_t early = 0;
  for (int step = 0; step < 1000; ++step) {
    trainer.step(kBatch, body);
    update(trainer);
    if (step == 100) early = pool_->peak_bytes();
  }
  fetched(trainer);
  EXPECT_GT(early, 0U);
  EXPECT_EQ(pool_->peak_bytes(), early);
}

TEST_P(OnAGpu, AFailedStepLeavesNothingBehindAndTheNextOneIsRight) {
  Trainer trainer(DeviceGroup(devices_), {.parameter_count = kWidth, .balance = Balance::even, .micro_batch = 8});
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const Trainer::Body body = body_with({.after_backward = 0});
  EXPECT_THROW(trainer.step(kBatch,
                            [&](const MicroBatch& mb, Trainer::Replica& replica) {
                              const double loss = body(mb, replica);
                              if (mb.end == kBatch) throw std::runtime_error("no");
                              return loss;
                            }),
               Error);
  ASSERT_NO_FATAL_FAILURE(expect_equal_steps(trainer, {}, 3));
}

TEST_P(OnAGpu, WaitsForTheCallersOwnStreamAndLeavesTheCallersDevice) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    Trainer trainer(DeviceGroup(devices_), {.parameter_count = kWidth, .stream = stream});
    ASSERT_EQ(trainer.stream(), stream);
    ASSERT_NO_FATAL_FAILURE(expect_equal_steps(trainer, {.before_step = true, .before_update = true}, 3));
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(Gpu, OnAGpu, ::testing::ValuesIn(gpu_test::boxes()),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace paceline

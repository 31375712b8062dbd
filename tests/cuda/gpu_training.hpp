// SPDX-License-Identifier: Apache-2.0
//
// What tests of training on GPUs that are not there share: a problem with its answer, its kernels, and sets of devices.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/partition.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "nccl_host.hpp"
#include "twins.hpp"

namespace paceline {

using Trainer = BasicDataParallel<double>;

inline constexpr std::size_t kWidth = 5;
inline constexpr std::int64_t kBatch = 24;

/// Item k: half the squared distance between the parameters and a point of its own.
inline double point(std::int64_t item, std::size_t j) {
  return std::sin(static_cast<double>(item) * 3.1 + static_cast<double>(j));
}

inline double add_gradients(std::int64_t begin, std::int64_t end, const double* parameters, double* gradients) {
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
inline void backward_kernel(Work) {}
inline void update_kernel(double*, const double*) {}

inline std::atomic<int> in_flight{0};
inline std::atomic<int> most_in_flight{0};

/// The fake NCCL is there, too, and found first.
inline fake::Nccl& boot(std::uint64_t seed, int device_count) {
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
  return fake::boot_nccl();
}

inline double body(const MicroBatch& mb, Trainer::Replica& replica) {
  if (replica.stream == nullptr) {
    return add_gradients(mb.begin, mb.end, replica.parameters.data(), replica.gradients.data());
  }
  const double speed = replica.device == 0 ? 1.0 : 0.5;
  Work work{mb.begin,
            mb.end,
            replica.parameters.data(),
            replica.gradients.data(),
            replica.loss_sum,
            1e-3 * static_cast<double>(mb.size()) / speed};
  void* arguments[] = {&work};
  const int now = ++in_flight;
  most_in_flight = std::max(most_in_flight.load(), now);
  EXPECT_EQ(
      cudaLaunchKernel(reinterpret_cast<const void*>(&backward_kernel), dim3(1), dim3(1), arguments, 0, replica.stream),
      cudaSuccess);
  return 0.0;
}

inline void update(Trainer& trainer) {
  double* parameters = trainer.parameters().data();
  const double* gradients = trainer.gradients().data();
  void* arguments[] = {&parameters, &gradients};
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(
      cudaLaunchKernel(reinterpret_cast<const void*>(&update_kernel), dim3(1), dim3(1), arguments, 0, trainer.stream()),
      cudaSuccess);
}

/// What the parameters are, once everything has run.
inline std::vector<double> fetched(Trainer& trainer) {
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
  std::vector<double> fractions{};        ///< of each GPU that is split
  Transport transport = Transport::nccl;  ///< between several GPUs
  bool parts_as_gpus = false;             ///< each part is a memory space of its own
  bool through_host = false;              ///< and copies between them go through the host
};

inline void PrintTo(const Box& box, std::ostream* out) { *out << box.name; }

/// Without fractions "cuda:0/1" stands for a second queue of the whole cuda:0.
inline DeviceGroup group_of(const Box& box) {
  if (box.parts_as_gpus) setenv("PACELINE_PARTS_AS_GPUS", "1", 1);
  if (box.through_host) setenv("PACELINE_PEER_ACCESS", "0", 1);
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

inline void make_whole(const Box& box) {
  unsetenv("PACELINE_PARTS_AS_GPUS");
  unsetenv("PACELINE_PEER_ACCESS");
  for (int gpu = 0; gpu < box.gpus; ++gpu) release_partitions("cuda:" + std::to_string(gpu));
}

}  // namespace paceline

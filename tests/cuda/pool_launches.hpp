// SPDX-License-Identifier: Apache-2.0
//
// For tests of pools on GPUs: jobs launch a kernel that takes some seconds and is counted.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>

#include <paceline/runtime/async_device.hpp>

#include "fake_cuda.hpp"
#include "twins.hpp"

namespace paceline {

inline std::atomic<int> ran{0};
inline void count_kernel(double) {}

inline void set_up(std::uint64_t seed, int gpus) {
  fake::boot({.seed = seed, .device_count = gpus});
  fake::set_twins();
  ran = 0;
  fake::twin(&count_kernel, [](const fake::Launch&, double seconds) {
    fake::takes(seconds);
    ++ran;
  });
}

inline void launch(int device, Stream* stream, double seconds = 0.001) {
  void* pointers[] = {&seconds};
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  EXPECT_EQ(
      cudaLaunchKernel(reinterpret_cast<const void*>(&count_kernel), dim3(1), dim3(1), pointers, 0, stream->native()),
      cudaSuccess);
}

}  // namespace paceline

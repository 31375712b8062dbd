// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace paceline::gpu_test {

/// Forward and backward of items [begin, end): item k is half the squared distance between the parameters and point().
struct Work {
  std::int64_t begin;
  std::int64_t end;
  const double* parameters;
  double* gradients;
  double* loss;
  std::size_t width;
};

/// Integer arithmetic up to the last division, so that device and host agree to the bit.
__host__ __device__ inline double point(std::int64_t item, std::size_t j) {
  return static_cast<double>((item * 131 + static_cast<std::int64_t>(j) * 17) % 1009) / 1009.0;
}

// No templates, so that other translation units have names for them. One thread per parameter.
__global__ void paceline_test_backward(Work work);
__global__ void paceline_test_update(double* parameters, const double* gradients, std::size_t width);
/// Keeps its stream busy until the GPU's own clock has advanced so far, whatever frequency the SMs run at.
__global__ void paceline_test_delay(unsigned long long nanoseconds);

constexpr double kLearningRate = 0.5;
constexpr unsigned int kThreads = 128;

/// Launches with enough blocks of kThreads for `width` elements.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), cudaStream_t stream, std::size_t width, A... values) {
  void* arguments[] = {static_cast<void*>(&values)...};
  const auto blocks = static_cast<unsigned int>((width + kThreads - 1) / kThreads);
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(width == 1 ? 1 : kThreads),
                          arguments, 0, stream);
}

}  // namespace paceline::gpu_test

// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

namespace paceline::gpu_test {

__global__ void paceline_test_backward(Work work) {
  const std::size_t j = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= work.width) return;
  double loss = 0.0;
  double gradient = 0.0;
  for (std::int64_t item = work.begin; item < work.end; ++item) {
    const double distance = work.parameters[j] - point(item, j);
    loss += distance * distance / 2;
    gradient += distance;
  }
  work.gradients[j] += gradient;
  atomicAdd(work.loss, loss);
}

__global__ void paceline_test_update(double* parameters, const double* gradients, std::size_t width) {
  const std::size_t j = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j < width) parameters[j] -= kLearningRate * gradients[j];
}

__global__ void paceline_test_delay(unsigned long long nanoseconds) {
  unsigned long long begin = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace paceline::gpu_test

// SPDX-License-Identifier: Apache-2.0
//
// The delay for tests in Python, which load this library by ctypes.
#include "kernels.hpp"

/// On the calling thread's current device. Returns CUDA's error, 0 for none.
extern "C" __attribute__((visibility("default"))) int paceline_test_delay_on(void* stream,
                                                                             unsigned long long nanoseconds) {
  return static_cast<int>(paceline::gpu_test::launch(&paceline::gpu_test::paceline_test_delay,
                                                     static_cast<cudaStream_t>(stream), 1, nanoseconds));
}

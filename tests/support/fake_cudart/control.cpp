// SPDX-License-Identifier: Apache-2.0
//
// The fake for Python tests, by ctypes. PyTorch's CPU tensors stand for the GPU's there: their memory is nobody's
// allocation, and their operators run during the call, so whatever is enqueued runs at once, too.
#include <string>

#include "fake_cuda.hpp"
#include "twins.hpp"

#define PACELINE_FAKE_API extern "C" __attribute__((visibility("default")))

PACELINE_FAKE_API void paceline_fake_boot(int device_count) {
  fake::boot({.device_count = device_count, .eager = true, .lag = 20, .foreign_memory = true});
  fake::set_twins();
}

PACELINE_FAKE_API void paceline_fake_hang(void* stream) { fake::hang(static_cast<cudaStream_t>(stream)); }

PACELINE_FAKE_API void paceline_fake_go_on(void* stream) { fake::go_on(static_cast<cudaStream_t>(stream)); }

PACELINE_FAKE_API void paceline_fake_poison(int device, int error) {
  fake::poison(device, static_cast<cudaError_t>(error));
}

PACELINE_FAKE_API void paceline_fake_fail_allocation(int count) { fake::fail_allocation(count); }

/// Streams, events, memory, pools and green contexts that were not given back.
PACELINE_FAKE_API int paceline_fake_leftovers() {
  const fake::Leftovers left = fake::leftovers();
  return static_cast<int>(left.device_allocations + left.host_allocations + left.pools + left.streams + left.events +
                          left.green_contexts + left.queued);
}

PACELINE_FAKE_API int paceline_fake_synchronize_calls() { return fake::synchronize_calls(); }

PACELINE_FAKE_API int paceline_fake_problems(char* text, int size) {
  const auto problems = fake::problems();
  if (!problems.empty() && size > 0) {
    const std::string first = problems.front().substr(0, static_cast<std::size_t>(size) - 1);
    first.copy(text, first.size());
    text[first.size()] = '\0';
  }
  return static_cast<int>(problems.size());
}

// SPDX-License-Identifier: Apache-2.0
//
// Controls the fake from Python tests, through ctypes. There PyTorch's CPU tensors stand for the GPU's tensors. The
// fake has not allocated their memory, and their operators run during the call. So all enqueued work runs at once, too.
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <utility>

#include "fake_cuda.hpp"
#include "machine.hpp"
#include "nccl_host.hpp"
#include "twins.hpp"

#define PACELINE_FAKE_API extern "C" __attribute__((visibility("default")))

PACELINE_FAKE_API void paceline_fake_boot(int device_count) {
  fake::boot({.device_count = device_count, .eager = true, .lag = 20, .foreign_memory = true});
  fake::set_twins();
  fake::boot_nccl();
}

PACELINE_FAKE_API void paceline_fake_lie(int source, int target) { fake::lie(source, target); }

PACELINE_FAKE_API void paceline_fake_set_memory(int device, std::size_t bytes) { fake::set_memory(device, bytes); }

/// Faults of the fake NCCL; rank -1 means any rank.
PACELINE_FAKE_API void paceline_fake_nccl_fail(const char* function, int rank, int result) {
  fake::the_nccl().fail(function, rank, static_cast<paceline::nccl::Result>(result));
}

PACELINE_FAKE_API void paceline_fake_nccl_hang(const char* function) { fake::the_nccl().hang(function); }

PACELINE_FAKE_API int paceline_fake_nccl_calls(const char* function) { return fake::the_nccl().calls(function); }

PACELINE_FAKE_API void paceline_fake_hang(void* stream) { fake::hang(static_cast<cudaStream_t>(stream)); }

PACELINE_FAKE_API void paceline_fake_go_on(void* stream) { fake::go_on(static_cast<cudaStream_t>(stream)); }

/// An event of a graph, which records it whenever it is launched.
PACELINE_FAKE_API void* paceline_fake_make_event(int device) {
  const std::lock_guard lock(fake::machine().mutex);
  return fake::machine().make_event(device, false);
}

PACELINE_FAKE_API void paceline_fake_record(void* event, void* stream) {
  const std::lock_guard lock(fake::machine().mutex);
  fake::machine().record(fake::machine().resolve(static_cast<cudaStream_t>(stream)), static_cast<fake::Event*>(event));
}

PACELINE_FAKE_API void paceline_fake_destroy_event(void* event) {
  const std::lock_guard lock(fake::machine().mutex);
  fake::machine().destroy(static_cast<fake::Event*>(event));
}

PACELINE_FAKE_API void paceline_fake_poison(int device, int error) {
  fake::poison(device, static_cast<cudaError_t>(error));
}

PACELINE_FAKE_API void paceline_fake_fail_allocation(int count) { fake::fail_allocation(count); }

/// The number of streams, events, allocations, pools and green contexts that were not freed.
PACELINE_FAKE_API int paceline_fake_leftovers() {
  const fake::Leftovers left = fake::leftovers();
  return static_cast<int>(left.device_allocations + left.host_allocations + left.pools + left.streams + left.events +
                          left.green_contexts + left.queued) +
         fake::the_nccl().communicators();
}

PACELINE_FAKE_API long paceline_fake_unused_pool_bytes() { return static_cast<long>(fake::unused_pool_bytes()); }

PACELINE_FAKE_API int paceline_fake_synchronize_calls() { return fake::synchronize_calls(); }

PACELINE_FAKE_API int paceline_fake_problems(char* text, int size) {
  auto problems = fake::problems();
  for (std::string& problem : fake::the_nccl().problems()) problems.push_back(std::move(problem));
  if (!problems.empty() && size > 0) {
    const std::string first = problems.front().substr(0, static_cast<std::size_t>(size) - 1);
    first.copy(text, first.size());
    text[first.size()] = '\0';
  }
  return static_cast<int>(problems.size());
}

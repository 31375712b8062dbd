// SPDX-License-Identifier: Apache-2.0
#include "runtime/thread_affinity.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstddef>

namespace paceline {

void pin_this_thread(const std::vector<int>& cores) noexcept {
  if (cores.empty()) return;
  const auto count = static_cast<std::size_t>(*std::max_element(cores.begin(), cores.end())) + 1;
  cpu_set_t* mask = CPU_ALLOC(count);
  if (mask == nullptr) return;
  const std::size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, mask);
  for (const int core : cores) CPU_SET_S(static_cast<std::size_t>(core), bytes, mask);
  pthread_setaffinity_np(pthread_self(), bytes, mask);
  CPU_FREE(mask);
}

}  // namespace paceline

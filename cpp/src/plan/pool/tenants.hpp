// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <paceline/plan/pool_types.hpp>

#include "plan/pool/job_slots.hpp"
#include "plan/pool/key_queue.hpp"

namespace paceline::plan {

inline constexpr std::size_t kClasses = 4;
inline constexpr std::size_t kTimed = kClasses;  // the queue of jobs with deadlines

inline std::size_t queue_of(const PoolEntry& job) {
  return job.timed() ? kTimed : static_cast<std::size_t>(job.priority);
}

/// A tenant's jobs in one line.
struct TenantJobs {
  std::size_t tenant = 0;
  std::array<KeyQueue, kClasses + 1> queues = {};
};

/// A tenant, and what start-time fair queueing keeps of it.
struct Tenant {
  struct Class {
    double start = 0.0;        // the start tag of its next job without a deadline, unless the virtual time is later
    double debt = 0.0;         // charges of jobs with deadlines over the weight, for the one after that
    std::int64_t waiting = 0;  // jobs without deadlines that may start
  };
  PoolTenant spec = {};
  double served = 0.0;
  std::int64_t waiting = 0;
  std::array<Class, kClasses> classes = {};
  // Of one decision.
  std::int64_t devices = 0;
  double bytes = 0.0;
  KeyEntry held{kNever, JobId{}};  // what a quota has held for long: later jobs wait, too
};

/// What is kept of a job where there are tenants.
struct Turn {
  double charge = 1.0;
  double place = kNever;  // its turn in its priority: the key of one of its jobs
  bool charged = false;
};

}  // namespace paceline::plan

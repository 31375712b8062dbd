// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <tuple>
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
using TenantJobs = std::array<KeyQueue, kClasses + 1>;

inline std::int64_t size_of(const TenantJobs& queues) {
  return std::accumulate(queues.begin(), queues.end(), std::int64_t{0},
                         [](std::int64_t sum, const KeyQueue& one) { return sum + one.size(); });
}

/// Whether it has a quota.
inline bool limited(const PoolTenant& tenant) {
  return tenant.devices < std::numeric_limits<std::int64_t>::max() || tenant.memory_bytes < kNever;
}

struct Tenant {
  PoolTenant spec = {};
  double served = 0.0;
  std::int64_t waiting = 0;
  std::array<std::int64_t, kClasses> plain = {};         // jobs without deadlines that may start
  std::set<std::tuple<bool, double, JobId>> gangs = {};  // that wait: background, key
  // Of one decision.
  std::int64_t devices = 0;
  double bytes = 0.0;
  // The first job that has waited for long, if there is a quota: later ones start only if the quota holds it beside
  // them.
  KeyEntry held{kNever, JobId{}};
  std::size_t held_kind = 0;
  std::int64_t held_gang = 0;
};

/// What start-time fair queueing keeps of jobs that wait for the same devices, or of all.
struct FairTags {
  struct Tag {
    double start = 0.0;  // of the tenant's next job without a deadline, unless the virtual time is later
    double debt = 0.0;   // charges of jobs with deadlines over the weight, for the one after that
  };
  std::array<double, kClasses> virtual_time = {};                                           // of each priority
  std::vector<std::array<Tag, kClasses>> tags = std::vector<std::array<Tag, kClasses>>(1);  // of each tenant

  [[nodiscard]] double start_tag(std::size_t tenant, std::size_t cls) const {
    return std::max(tags[tenant][cls].start, virtual_time[cls]);
  }
  [[nodiscard]] double least_tag(std::span<const std::size_t> of, std::size_t cls) const {
    double least = kNever;
    for (const std::size_t tenant : of) least = std::min(least, start_tag(tenant, cls));
    return least;
  }
};

/// What is kept of a job where there are tenants.
struct Turn {
  double place = kNever;             // its turn in its priority: the key of one of its jobs
  std::array<bool, 3> charged = {};  // to which of State::tags_of()
};

}  // namespace paceline::plan

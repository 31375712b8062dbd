// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <paceline/plan/cost_model.hpp>

#include "plan/pool/cost_window.hpp"
#include "plan/pool/job_slots.hpp"
#include "plan/pool/key_queue.hpp"
#include "plan/pool/tenants.hpp"

namespace paceline::plan {

/// Jobs that wait for the same: of one kind, need and class, and bound to one device or to none.
struct PoolLine {
  std::size_t kind = 0;
  std::size_t need = 0;
  std::size_t bound = kNone;
  bool background = false;
  bool padded = false;
  // Apart, because a device finds the first deadline that it can keep by one search, and what expires is a prefix.
  KeyQueue timed = {};
  KeyQueue plain = {};
  CostWindow window = {};  // if padded
  // The same jobs, if the pool has tenants: of those that wait here; and the turns of each priority, by who holds them.
  std::map<std::size_t, TenantJobs> tenants = {};
  std::array<KeyQueue, kClasses> places = {};
  std::size_t lead = kTimed;  // of one decision: the priority that is next, and the turn that it is offered
  KeyEntry lead_place = {};
  // Of one decision: the least start tag of who waits elsewhere for the same devices, and for any, in each priority.
  std::array<std::array<double, kClasses>, 2> elsewhere = {};
  FairTags fills = {};       // of those that fill up batches of others
  double cost = 0.0;         // of all that wait
  std::int64_t limited = 0;  // jobs whose batches must be smaller

  // A device that may run these jobs.
  struct Ranked {
    std::size_t device = 0;
    double seconds = 0.0;  // of a typical job, with `load`
    double load = 0.0;     // of the model
    std::int64_t largest = 0;
    CostModel model = {};
    double rate = 0.0;  // typical jobs a second, in the largest batches; 0 if unknown
  };
  std::vector<Ranked> ranked = {};    // the fastest first
  std::vector<Ranked> released = {};  // those that come back for a deadline
  std::uint64_t epoch = 0;            // of `ranked`
  bool known = false;                 // enough samples of every class
  bool released_known = true;         // the same of `released`
  bool on_lines = true;               // a device's larger batches take longer
  double least_seconds = 0.0;         // of a typical job; 0 if unknown
  double rate = 0.0;                  // of `ranked`
  double released_rate = 0.0;         // of `released`

  [[nodiscard]] std::int64_t size() const noexcept { return timed.size() + plain.size(); }
  /// The job that is next; null if none is.
  [[nodiscard]] const KeyEntry* front() const {
    const KeyEntry* other = plain.empty() ? nullptr : &plain.front();
    return timed.empty() || (other != nullptr && *other < timed.front()) ? other : &timed.front();
  }
  void insert(const PoolEntry& job) {
    (job.timed() ? timed : plain).insert({job.key, job.id});
    cost += job.cost;
    limited += job.limited() ? 1 : 0;
    if (padded) window.insert(job);
  }
  void erase(const PoolEntry& job) {
    (job.timed() ? timed : plain).erase({job.key, job.id});
    limited -= job.limited() ? 1 : 0;
    if (padded) window.erase(job);
    cost = size() > 0 ? cost - job.cost : 0.0;  // so that no rounding stays
  }
};

}  // namespace paceline::plan

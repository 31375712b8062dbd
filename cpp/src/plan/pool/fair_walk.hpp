// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "plan/pool/state.hpp"

namespace paceline::plan {

/// The jobs of a line that a device can end in time, in the order in which tenants take their turns, as far as their
/// quotas let all of them be in one batch.
class FairWalk {
 public:
  FairWalk(const PoolState::State& state, const PoolLine& line, const PoolLine::Ranked& on, double now)
      : state_(state),
        line_(line),
        on_(on),
        now_(now),
        taken_(line.tenants.size(), 0),
        tags_(state.fair[1 + state.sets[line.need]]),
        held_(line.tenants.size(), 0) {
    const KeyEntry in_time{end_of(state.kinds[line.kind].spec.padded ? 0.0 : 1.0), JobId{}};
    for (std::size_t own = 0; own < line.tenants.size(); ++own) {
      for (std::size_t q = 0; q <= kTimed; ++q) {
        const KeyQueue& queue = line.tenants[own].queues[q];
        if (queue.empty()) continue;
        const double tag = q == kTimed ? 0.0 : tags_.start_tag(line.tenants[own].tenant, q);
        sources_.push_back({own, q, &queue, q == kTimed ? queue.lower_bound(in_time) : queue.begin(), tag});
      }
    }
    for (std::size_t cls = 0; cls < kClasses; ++cls) places_[cls] = line.places[cls].begin();
  }

  /// Null: there are no more.
  const PoolEntry* next() {
    Source* best = nullptr;
    auto first = std::tuple(KeyEntry{}, 0.0, KeyEntry{});
    for (Source& one : sources_) {
      const KeyEntry* const entry = front_of(one);
      if (entry == nullptr) continue;
      const auto turn = std::tuple(one.queue == kTimed  ? *entry
                                   : one.queue == lead_ ? line_.lead_place
                                                        : *line_.places[one.queue].at(places_[one.queue]),
                                   one.tag, *entry);
      if (best != nullptr && !(turn < first)) continue;
      best = &one;
      first = turn;
    }
    if (best == nullptr) return nullptr;
    const PoolEntry& job = state_.jobs.at(best->jobs->at(best->at)->id);
    best->at = best->jobs->next(best->at);
    ++taken_[best->own];
    if (job.id == state_.tenants[job.tenant].held.id) held_[best->own] = 1;
    if (best->queue != kTimed) {
      const Tenant& tenant = state_.tenants[job.tenant];
      const double debt = best->charged ? 0.0 : tags_.tags[job.tenant][best->queue].debt;
      best->tag += state_.owed(job) / tenant.spec.weight + debt;
      best->charged = true;
      places_[best->queue] = line_.places[best->queue].next(places_[best->queue]);
      if (best->queue == lead_) lead_ = kTimed;
    }
    return &job;
  }

 private:
  struct Source {
    std::size_t own;  // tenant, by its place in the line
    std::size_t queue;
    const KeyQueue* jobs;
    KeyQueue::Place at;
    double tag;
    bool charged = false;
  };

  // Null: none of them may be in this batch.
  const KeyEntry* front_of(Source& one) {
    const std::size_t tenant = line_.tenants[one.own].tenant;
    const KeyEntry* entry = one.jobs->at(one.at);
    while (entry != nullptr && one.queue == kTimed && end_of(state_.jobs.at(entry->id).cost) > entry->key) {
      one.at = one.jobs->next(one.at);
      entry = one.jobs->at(one.at);
    }
    const std::int64_t jobs = taken_[one.own] + 1;
    return entry != nullptr && state_.may_start(tenant, *entry, line_.kind, 1, jobs, held_[one.own] != 0) ? entry
                                                                                                          : nullptr;
  }
  [[nodiscard]] double end_of(double cost) const {
    return now_ + state_.kinds[line_.kind].margin * (state_.alone_seconds(line_, on_, cost) + on_.load);
  }

  const PoolState::State& state_;
  const PoolLine& line_;
  const PoolLine::Ranked& on_;
  double now_;
  std::vector<Source> sources_;
  std::vector<std::int64_t> taken_;  // jobs of each tenant in the line
  const FairTags& tags_;
  std::vector<char> held_;  // whether those of the tenant include what it has held for long
  std::array<KeyQueue::Place, kClasses> places_;
  std::size_t lead_ = line_.lead;  // until its turn is taken
};

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/pool/state.hpp"

namespace paceline::plan {

/// The jobs of a line that a device can end in time, in the order in which tenants take their turns, as far as their
/// quotas let all of them be in one batch. The tenants of each queue are a heap, so a job costs the logarithm of their
/// number.
class FairWalk {
 public:
  FairWalk(const PoolState::State& state, const PoolLine& line, const PoolLine::Ranked& on, double now)
      : state_(state),
        line_(line),
        on_(on),
        now_(now),
        taken_(state.tenants.size(), 0),
        tags_(state.fair[1 + state.sets[line.need]]),
        held_(state.tenants.size(), 0) {
    const KeyEntry in_time{end_of(state.kinds[line.kind].spec.padded ? 0.0 : 1.0), JobId{}};
    for (const auto& [tenant, queues] : line.tenants) {
      for (std::size_t q = 0; q <= kTimed; ++q) {
        if (queues[q].empty()) continue;
        const double tag = q == kTimed ? 0.0 : tags_.start_tag(tenant, q);
        Source one{tenant, &queues[q], q == kTimed ? queues[q].lower_bound(in_time) : queues[q].begin(), tag};
        if (find_first(one, q)) heaps_[q].push_back(one);
      }
    }
    for (std::vector<Source>& heap : heaps_) std::ranges::make_heap(heap, later);
    for (std::size_t cls = 0; cls < kClasses; ++cls) places_[cls] = line.places[cls].begin();
    find_fills();
  }

  /// Null: there are no more.
  const PoolEntry* next() {
    std::size_t best = heaps_.size();
    std::tuple<KeyEntry, double, KeyEntry> first;
    for (std::size_t q = 0; q <= kTimed; ++q) {
      const Source* const one = top_of(q);
      if (one == nullptr) continue;
      const std::tuple turn(q == kTimed ? one->first : turn_of(q), one->tag, one->first);
      if (best < heaps_.size() && !(turn < first)) continue;
      best = q;
      first = turn;
    }
    if (best == heaps_.size()) return nullptr;
    std::vector<Source>& heap = heaps_[best];
    std::ranges::pop_heap(heap, later);
    Source& one = heap.back();
    const PoolEntry& job = state_.jobs.at(one.first.id);
    one.at = one.jobs->next(one.at);
    if (best != kTimed) {
      const double debt = one.charged || one.fills ? 0.0 : tags_.tags[job.tenant][best].debt;
      one.tag += state_.owed(job) / state_.tenants[job.tenant].spec.weight + debt;
      one.charged = true;
      places_[best] = line_.places[best].next(places_[best]);
      if (best == lead_) lead_ = kTimed;
    }
    ++taken_[job.tenant];
    if (find_first(one, best)) {
      std::ranges::push_heap(heap, later);
    } else {
      heap.pop_back();
    }
    if (job.id == state_.tenants[job.tenant].held.id) let_start(job.tenant);
    return &job;
  }

 private:
  struct Source {
    std::size_t tenant;
    const KeyQueue* jobs;
    KeyQueue::Place at;
    double tag;
    KeyEntry first = {};  // what is there
    bool charged = false;
    bool fills = false;  // batches of others, after these: the tag is of those who do
  };
  static bool later(const Source& a, const Source& b) {
    return std::tie(b.fills, b.tag, b.first) < std::tie(a.fills, a.tag, a.first);
  }
  [[nodiscard]] KeyEntry turn_of(std::size_t q) const {
    return q == lead_ ? line_.lead_place : *line_.places[q].at(places_[q]);
  }

  // As start_jobs() finds them.
  void find_fills() {
    if (std::ranges::all_of(line_.elsewhere[0], [](double tag) { return tag == kNever; })) return;
    std::size_t first = kTimed;  // the priority of the first job without a deadline
    for (std::size_t q = 0; q < kTimed; ++q) {
      if (top_of(q) != nullptr && (first == kTimed || turn_of(q) < turn_of(first))) first = q;
    }
    for (std::size_t q = 0; q < kTimed; ++q) {
      const double pays = std::max(line_.elsewhere[0][q], q == first ? top_of(q)->tag : 0.0);
      const auto mark = [&](Source& one) {
        if (one.tag <= pays) return;
        one.fills = true;
        one.tag = line_.fills.start_tag(one.tenant, q);
      };
      std::ranges::for_each(heaps_[q], mark);
      for (auto& [of, one] : refused_) {
        if (of == q) mark(one);  // it may be let
      }
      std::ranges::make_heap(heaps_[q], later);
    }
  }

  // False: it has no more that this device ends in time.
  bool find_first(Source& one, std::size_t q) const {
    for (const KeyEntry* entry = one.jobs->at(one.at); entry != nullptr; entry = one.jobs->at(one.at)) {
      one.first = *entry;
      if (q != kTimed || end_of(state_.jobs.at(entry->id).cost) <= entry->key) return true;
      one.at = one.jobs->next(one.at);
    }
    return false;
  }
  // The first one of a queue that may be in this batch. Whoever may not does not come back, unless it is let.
  const Source* top_of(std::size_t q) {
    std::vector<Source>& heap = heaps_[q];
    while (!heap.empty()) {
      const Source& one = heap.front();
      const std::int64_t jobs = taken_[one.tenant] + 1;
      if (state_.may_start(one.tenant, one.first, line_.kind, 1, jobs, held_[one.tenant] != 0)) return &one;
      std::ranges::pop_heap(heap, later);
      refused_.emplace_back(q, heap.back());
      heap.pop_back();
    }
    return nullptr;
  }
  // The batch has what the tenant has held for long, so nothing must be left for that.
  void let_start(std::size_t tenant) {
    held_[tenant] = 1;
    for (const auto& [q, one] : refused_) {
      if (one.tenant != tenant) continue;
      heaps_[q].push_back(one);
      std::ranges::push_heap(heaps_[q], later);
    }
    std::erase_if(refused_, [&](const auto& one) { return one.second.tenant == tenant; });
  }
  [[nodiscard]] double end_of(double cost) const {
    return now_ + state_.kinds[line_.kind].margin * (state_.alone_seconds(line_, on_, cost) + on_.load);
  }

  const PoolState::State& state_;
  const PoolLine& line_;
  const PoolLine::Ranked& on_;
  double now_;
  std::array<std::vector<Source>, kClasses + 1> heaps_ = {};
  std::vector<std::pair<std::size_t, Source>> refused_;  // by their quotas, with their queues
  std::vector<std::int64_t> taken_;                      // jobs of each tenant
  const FairTags& tags_;
  std::vector<char> held_;  // whether those of the tenant include what it has held for long
  std::array<KeyQueue::Place, kClasses> places_;
  std::size_t lead_ = line_.lead;  // until its turn is taken
};

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "plan/pool/job_slots.hpp"
#include "plan/pool/key_queue.hpp"

namespace paceline::plan {

/// A job by its cost; those of equal costs by their keys.
struct CostEntry {
  double cost = 0.0;
  KeyEntry key = {};
  bool timed = false;  // the key is its deadline

  explicit CostEntry(const PoolEntry& job) : cost(job.cost), key{job.key, job.id}, timed(job.timed()) {}
  friend bool operator<(const CostEntry& a, const CostEntry& b) {
    return a.cost < b.cost || (a.cost == b.cost && a.key < b.key);
  }
};

/// The first jobs of a line in the order of their costs, kept from decision to decision: sorting them anew took most of
/// a decision. It has all jobs of the line up to some key, and reads on when more are asked for.
class CostWindow {
 public:
  static constexpr std::size_t kMost = 1024;  // what is asked for at most: with more, insertions would be slow

  /// Of a job that comes into the line, or leaves it.
  void insert(const PoolEntry& job) {
    const CostEntry entry(job);
    if (end_ < entry.key) return;
    entries_.insert(std::ranges::lower_bound(entries_, entry, std::less<>()), entry);
    if (entries_.size() > 2 * kMost) cut(kMost);
  }
  void erase(const PoolEntry& job) {
    const CostEntry entry(job);
    if (!(end_ < entry.key)) entries_.erase(std::ranges::lower_bound(entries_, entry, std::less<>()));
  }

  /// The first `count` jobs of the line by their keys, or all if there are fewer. Valid until the next call.
  std::span<const CostEntry> first(std::size_t count, const KeyQueue& timed, const KeyQueue& plain,
                                   const JobSlots& jobs) {
    if (entries_.size() < count) read_on(count, timed, plain, jobs);
    if (entries_.size() <= count) return entries_;
    const KeyEntry last = last_of(entries_, count);  // devices with more memory look at more
    first_.clear();
    std::ranges::copy_if(entries_, std::back_inserter(first_), [&](const CostEntry& one) { return !(last < one.key); });
    return first_;
  }

  /// Those of these with the `count` smallest keys, fewer than there are. In the same order.
  std::span<const CostEntry> smallest(std::span<const CostEntry> all, std::size_t count) {
    const KeyEntry last = last_of(all, count);
    some_.clear();
    std::ranges::copy_if(all, std::back_inserter(some_), [&](const CostEntry& one) { return !(last < one.key); });
    return some_;
  }

 private:
  [[nodiscard]] KeyEntry last_of(std::span<const CostEntry> all, std::size_t count) {
    keys_.clear();
    for (const CostEntry& one : all) keys_.push_back(one.key);
    const auto last = keys_.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    std::ranges::nth_element(keys_, last);
    return *last;
  }
  void cut(std::size_t count) {
    end_ = last_of(entries_, count);
    std::erase_if(entries_, [&](const CostEntry& one) { return end_ < one.key; });
  }
  void read_on(std::size_t count, const KeyQueue& timed, const KeyQueue& plain, const JobSlots& jobs) {
    const auto after = [&](const KeyQueue& queue) {
      const KeyQueue::Place place = queue.lower_bound(end_);
      const KeyEntry* const found = queue.at(place);
      return found != nullptr && *found == end_ ? queue.next(place) : place;
    };
    KeyQueue::Place a = after(timed);
    KeyQueue::Place b = after(plain);
    const std::size_t before = entries_.size();
    while (entries_.size() < count) {
      const KeyEntry* const x = timed.at(a);
      const KeyEntry* const y = plain.at(b);
      if (x == nullptr && y == nullptr) break;
      const bool first = y == nullptr || (x != nullptr && *x < *y);
      end_ = first ? *x : *y;
      entries_.emplace_back(jobs.at(end_.id));
      (first ? a : b) = first ? timed.next(a) : plain.next(b);
    }
    const auto fresh = entries_.begin() + static_cast<std::ptrdiff_t>(before);
    std::sort(fresh, entries_.end());
    some_.clear();
    std::merge(entries_.begin(), fresh, fresh, entries_.end(), std::back_inserter(some_));
    entries_.swap(some_);
  }

  std::vector<CostEntry> entries_;
  KeyEntry end_{-kNever, JobId{}};  // no job of the line up to it is missing
  std::vector<CostEntry> first_;    // kept, so that nothing is allocated
  std::vector<CostEntry> some_;
  std::vector<KeyEntry> keys_;
};

}  // namespace paceline::plan

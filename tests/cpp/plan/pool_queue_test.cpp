// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <set>

#include "draws.hpp"
#include "plan/pool/job_slots.hpp"
#include "plan/pool/key_queue.hpp"

namespace paceline::plan::testing {
namespace {

TEST(PoolQueue, IsASetThatCounts) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Draws draws(seed);
    KeyQueue queue;
    std::set<KeyEntry> set;
    const double growth = draws.real(0.3, 0.9);
    for (std::uint64_t i = 1; i < 5000; ++i) {
      const KeyEntry drawn{static_cast<double>(draws.integer(0, 50)), JobId{draws.chance(0.5) ? i : 5000 - i}};
      if (set.empty() || draws.chance(growth)) {
        if (set.insert(drawn).second) queue.insert(drawn);
      } else {
        auto gone = draws.chance(0.5) ? set.begin() : set.lower_bound(drawn);
        if (gone == set.end()) --gone;
        queue.erase(*gone);
        set.erase(gone);
      }
      ASSERT_EQ(queue.size(), std::ssize(set));
      if (i % 50 != 0 || set.empty()) continue;
      ASSERT_EQ(queue.front(), *set.begin());
      ASSERT_EQ(queue.count_before(drawn), std::distance(set.begin(), set.lower_bound(drawn)));
      const KeyEntry* found = queue.at(queue.lower_bound(drawn));
      ASSERT_EQ(found == nullptr, set.lower_bound(drawn) == set.end());
      KeyQueue::Place place = queue.begin();
      for (const KeyEntry& entry : set) {
        ASSERT_EQ(*queue.at(place), entry);
        place = queue.next(place);
      }
      ASSERT_EQ(queue.at(place), nullptr);
    }
  }
}

TEST(PoolQueue, FindsJobsByIdsThatAreNeverUsedAgain) {
  Draws draws(1);
  JobSlots slots(100);
  std::map<JobId, std::size_t> kinds;  // of those that are there
  std::set<JobId> gone;
  JobId last{};
  for (std::size_t i = 0; i < 5000; ++i) {
    if (!kinds.empty() && draws.chance(i % 1000 < 500 ? 0.3 : 0.6)) {
      const auto one = draws.chance(0.5) ? kinds.begin() : std::prev(kinds.end());
      slots.erase(*slots.find(one->first));
      gone.insert(one->first);
      kinds.erase(one);
    } else if (!slots.full()) {
      const JobId id = slots.next();
      ASSERT_GT(id, last);
      ASSERT_TRUE(slots.submitted(id) && !slots.submitted(JobId{}));
      last = id;
      if (draws.chance(0.1)) continue;  // rejected
      slots.add({.id = id, .kind = i});
      kinds[id] = i;
    } else {
      ASSERT_EQ(kinds.size(), 100U);
    }
    for (const auto& [id, kind] : kinds) ASSERT_EQ(slots.find(id)->kind, kind);
    if (i % 100 == 0) {
      for (const JobId id : gone) ASSERT_EQ(slots.find(id), nullptr);
    }
  }
  EXPECT_GT(gone.size(), 1000U);
  EXPECT_EQ(slots.find(JobId{}), nullptr);
  EXPECT_FALSE(slots.submitted(static_cast<JobId>(static_cast<std::uint64_t>(last) + JobSlots::kSlotMask + 1)));
}

}  // namespace
}  // namespace paceline::plan::testing

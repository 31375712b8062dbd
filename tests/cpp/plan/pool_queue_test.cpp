// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <iterator>
#include <set>

#include "draws.hpp"
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

}  // namespace
}  // namespace paceline::plan::testing

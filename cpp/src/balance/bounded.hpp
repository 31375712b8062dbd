// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

namespace paceline::balance {

/// Before `key` is put into a map that shall not outgrow `most` entries: removes the entry that was used longest ago,
/// if the map is full and has no such key. `last_used(value)` is the step of that entry's last use.
template <class Map, class LastUsed>
void make_room(Map& map, const typename Map::key_type& key, std::size_t most, const LastUsed& last_used) {
  if (map.size() < most || map.contains(key)) return;
  map.erase(std::min_element(map.begin(), map.end(),
                             [&](const auto& a, const auto& b) { return last_used(a.second) < last_used(b.second); }));
}

/// Adds a value to a list that keeps the last `most`.
template <class List>
void keep_last(List& list, typename List::value_type value, std::size_t most) {
  if (list.size() >= most) list.erase(list.begin());
  list.push_back(std::move(value));
}

}  // namespace paceline::balance

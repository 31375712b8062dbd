// SPDX-License-Identifier: Apache-2.0
#include <paceline/observe/event_ring.hpp>

#include <algorithm>
#include <array>

namespace paceline::observe {

EventRing::EventRing(std::size_t capacity) : capacity_(std::max<std::size_t>(capacity, 1)) {
  events_.reserve(capacity_);
}

void EventRing::push(const TraceEvent& event) {
  const std::lock_guard lock(mutex_);
  if (events_.size() < capacity_) {
    events_.push_back(event);
  } else {
    events_[static_cast<std::size_t>(pushed_ % capacity_)] = event;
  }
  ++pushed_;
}

std::vector<TraceEvent> EventRing::snapshot() const {
  const std::lock_guard lock(mutex_);
  std::vector<TraceEvent> ordered = events_;
  if (pushed_ > capacity_) {
    std::rotate(ordered.begin(), ordered.begin() + static_cast<std::ptrdiff_t>(pushed_ % capacity_), ordered.end());
  }
  return ordered;
}

const char* name_of(EventKind kind) noexcept {
  constexpr std::array kNames{"step", "micro_batch", "reduction", "move", "forward", "backward"};
  const auto index = static_cast<std::size_t>(kind);
  return index < kNames.size() ? kNames[index] : "unknown";
}

}  // namespace paceline::observe

// SPDX-License-Identifier: Apache-2.0
//
// How a step's parameters come to the memory spaces, what waits for them, and how devices update parts of them between
// two steps.
#include <paceline/engine/device_queues.hpp>

#include <utility>

#include <paceline/error.hpp>

#include "engine/queues/queue_state.hpp"
#include "engine/queues/relayed_copies.hpp"

namespace paceline {

void DeviceQueues::State::distribute(std::span<const SpaceCopy> copies) {
  home_stream->record(*ready);
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    Space& space = spaces[s];
    if (space.copies == nullptr || !space.takes_part) continue;
    space.copies->wait(*ready);
    if (s != kHome) step->begin_arrival(s, *space.maker, *space.copies);
  }
  if (collectives != nullptr) collectives->broadcast(copies);
  for (std::size_t i = 0; i < copies.size();) {
    std::vector<std::size_t> gets;  // this bucket
    std::vector<internal::CopyTarget> host, chain, from_home;
    for (const std::size_t bucket = copies[i].bucket; i < copies.size() && copies[i].bucket == bucket;) {
      const std::size_t begin = i;
      const std::size_t s = copies[i].space;
      auto& alike = on_host(s) ? host : copies[i].relayed ? chain : from_home;
      while (i < copies.size() && copies[i].bucket == bucket && copies[i].space == s &&
             copies[i].relayed == copies[begin].relayed) {
        ++i;
      }
      if (!spaces[s].takes_part || (collectives != nullptr && !on_host(s))) continue;
      alike.push_back({spaces[s].copies.get(), spaces[s].relayed.get(), copies.subspan(begin, i - begin)});
      gets.push_back(s);
    }
    for (const internal::CopyTarget& part : host) internal::copy_to_all(home_device(), {&part, 1}, false);
    internal::copy_to_all(home_device(), from_home, false);
    internal::copy_to_all(home_device(), chain, relays);
    for (const std::size_t s : gets) note_arrival(spaces[s], s, copies[i - 1].bucket);
  }
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    Space& space = spaces[s];
    if (space.copies == nullptr || !space.takes_part) continue;
    if (s != kHome) step->end_arrival(s, *space.copies);
    space.copies->record(*space.arrived);
  }
}

void DeviceQueues::State::note_arrival(Space& space, std::size_t index, std::size_t bucket) {
  while (space.arrivals.size() <= bucket) space.arrivals.push_back(space.maker->make_event(false));
  space.copies->record(*space.arrivals[bucket]);
  step->note_first_arrival(index, *space.maker, *space.copies);
}

std::shared_ptr<const StepTimes> DeviceQueues::begin_step(std::span<const SpaceCopy> copies,
                                                          const std::vector<bool>& takes_part) {
  State& state = *state_;
  if (state.left) drain();
  state.check();
  if (state.collectives != nullptr) state.collectives->check();
  state.step = std::make_shared<internal::RecordedTimes>(state.evidence, state.spare_events, state.space_of_device(),
                                                         state.home_device(), state.options.timeout, state.hung,
                                                         state.collectives);
  state.begin(takes_part);
  try {
    state.distribute(copies);
  } catch (...) {
    drain();  // nobody else would: the step has not begun
    throw;
  }
  return state.step;
}

bool DeviceQueues::enter(DeviceId device, bool at_once) {
  State& state = *state_;
  State::Queue& queue = state.queues[device];
  if (std::exchange(queue.entered, true)) return false;
  const bool needs_none = queue.space == State::kHome || !(at_once || state.collectives != nullptr);
  state.step->enter(device, !needs_none);
  const Event& arrival = needs_none ? *state.ready : *state.spaces[queue.space].arrived;
  if (queue.source != nullptr) queue.source->wait(*state.ready);
  if (queue.stream == nullptr) {
    state.await(arrival);
  } else if (queue.own_stream != nullptr) {
    queue.stream->wait(arrival);
  }
  return true;
}

void DeviceQueues::need(DeviceId device, std::size_t bucket) {
  State& state = *state_;
  State::Queue& queue = state.queues[device];
  const auto& arrivals = state.spaces[queue.space].arrivals;
  if (queue.space == State::kHome || bucket >= arrivals.size()) return;
  if (queue.stream == nullptr) {
    state.await(*arrivals[bucket]);
    return;
  }
  state.step->begin_wait(device, *queue.device, *queue.stream);
  queue.stream->wait(*arrivals[bucket]);
  state.step->end_wait(device, *queue.stream);
}

void DeviceQueues::begin_update(std::span<const DeviceId> devices, std::span<const DeviceCopy> copies) {
  State& state = *state_;
  if (state.left) drain();
  state.check();
  state.home_stream->record(*state.ready);
  for (const DeviceId device : devices) state.queues[device].stream->wait(*state.ready);
  for (const DeviceCopy& copy : copies) state.queues[copy.device].stream->copy(copy.to, copy.from, copy.bytes);
}

void DeviceQueues::end_update(std::span<const DeviceId> devices, std::span<const DeviceCopy> copies) {
  State& state = *state_;
  for (const DeviceId device : devices) {
    State::Queue& queue = state.queues[device];
    queue.stream->record(*queue.delivered);
    state.home_stream->wait(*queue.delivered);
    for (const DeviceCopy& copy : copies) {
      if (copy.device == device) state.home_stream->copy(copy.to, copy.from, copy.bytes);
    }
  }
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
//
// How a step's parameters come to the memory spaces, what waits for them, and how devices update parts of them between
// two steps.
#include <paceline/engine/device_queues.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "engine/queues/queue_state.hpp"
#include "engine/queues/relayed_copies.hpp"

namespace paceline {

void DeviceQueues::State::distribute(std::span<const SpaceCopy> copies) {
  home_stream->record(*ready);
  for (const SpaceCopy& copy : copies) {
    if (collectives != nullptr && !on_host(copy.space)) continue;
    Space& space = spaces[copy.space];
    while (space.arrivals.size() <= copy.bucket) space.arrivals.push_back(space.maker->make_event(false));
  }
  enqueued.set(0);
  sums->first([this, list = std::vector(copies.begin(), copies.end())] {
    try {
      enqueue(list);
      enqueued.set(internal::EnqueuedBuckets::kAll);
    } catch (...) {
      enqueued.fail(std::current_exception());
      throw;
    }
  });
}

Stream& DeviceQueues::State::copies_to(std::size_t space) {
  sums->check(on_host(space) ? kHome : space);
  return *spaces[space].copies;
}

void DeviceQueues::State::enqueue(std::span<const SpaceCopy> copies) {
  const auto gets_some = [&](std::size_t s) { return spaces[s].copies != nullptr && spaces[s].takes_part; };
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    if (!gets_some(s)) continue;
    copies_to(s).wait(*ready);
    if (s != kHome) step->begin_arrival(s, *spaces[s].maker, copies_to(s));
  }
  if (collectives != nullptr) collectives->broadcast(copies);
  while (!copies.empty()) {
    const std::size_t bucket = copies.front().bucket;
    const auto end = std::ranges::find_if(copies, [&](const SpaceCopy& copy) { return copy.bucket != bucket; });
    const auto count = static_cast<std::size_t>(end - copies.begin());
    enqueue_bucket(copies.first(count));
    enqueued.set(bucket + 1);
    copies = copies.subspan(count);
  }
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    if (!gets_some(s)) continue;
    if (s != kHome) step->end_arrival(s, copies_to(s));
    copies_to(s).record(*spaces[s].arrived);
  }
}

void DeviceQueues::State::enqueue_bucket(std::span<const SpaceCopy> copies) {
  std::vector<std::size_t> gets;
  std::vector<internal::CopyTarget> host, chain, from_home;
  for (std::size_t i = 0; i < copies.size();) {
    const std::size_t begin = i, s = copies[i].space;
    auto& alike = on_host(s) ? host : copies[i].relayed ? chain : from_home;
    while (i < copies.size() && copies[i].space == s && copies[i].relayed == copies[begin].relayed) ++i;
    if (!spaces[s].takes_part || (collectives != nullptr && !on_host(s))) continue;
    const auto on = [this, s]() -> Stream& { return copies_to(s); };
    alike.push_back({spaces[s].maker, on, spaces[s].relayed.get(), copies.subspan(begin, i - begin)});
    gets.push_back(s);
  }
  for (const internal::CopyTarget& part : host) internal::copy_to_all(home_device(), {&part, 1}, false);
  internal::copy_to_all(home_device(), from_home, false);
  internal::copy_to_all(home_device(), chain, relays);
  for (const std::size_t s : gets) {
    copies_to(s).record(*spaces[s].arrivals[copies.front().bucket]);
    step->note_first_arrival(s, *spaces[s].maker, copies_to(s));
  }
}

void DeviceQueues::State::await_enqueued(std::size_t buckets) {
  while (!enqueued.wait(buckets, options.timeout)) settle(std::chrono::nanoseconds::zero());
}

std::shared_ptr<const StepTimes> DeviceQueues::begin_step(std::span<const SpaceCopy> copies,
                                                          const std::vector<bool>& takes_part) {
  State& state = *state_;
  if (state.left) drain();
  state.check();
  if (state.collectives != nullptr) state.collectives->check();
  state.settle();  // it may still record what comes to the step before
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
  if (queue.entered) return false;
  const bool needs_none = queue.space == State::kHome || !(at_once || state.collectives != nullptr);
  if (!needs_none) state.await_enqueued(internal::EnqueuedBuckets::kAll);
  queue.entered = true;
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
  state.await_enqueued(bucket + 1);
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

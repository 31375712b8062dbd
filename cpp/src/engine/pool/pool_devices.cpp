// SPDX-License-Identifier: Apache-2.0
//
// The devices of a pool: those that come later, retired and lost ones, and the streams of GPUs.
#include <fmt/format.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include <paceline/error.hpp>

#include "engine/pool/added_device.hpp"
#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

plan::PoolDecisions PoolCore::place(Device device, double memory_bytes) {
  for (Kind& kind : kind_list_) kind.times.emplace_back(kRunsKept);
  if (device.queue != nullptr) gpus_ = true;
  devices_.push_back(std::move(device));
  const paceline::Device& facts = devices_.back().facts;
  return state_.add_device(now(), {.name = facts.name,
                                   .device_class = facts.device_class,
                                   .labels = {facts.kind == DeviceKind::host ? "host" : "cuda"},
                                   .memory_bytes = memory_bytes});
}

std::size_t PoolCore::place_of(const std::string& device, const char* call) const {
  const auto found = std::ranges::find(devices_, device, [](const Device& one) { return one.facts.name; });
  if (found == devices_.end()) {
    throw InvalidArgument(fmt::format("{}: the pool has no device '{}'.", call, device));
  }
  return static_cast<std::size_t>(found - devices_.begin());
}

void PoolCore::check_new(const std::string& device, double memory_bytes) const {
  check_process("add");
  if (!(memory_bytes > 0.0)) {
    throw InvalidArgument(fmt::format("add: the memory of {} is {} bytes; it must be positive.", device, memory_bytes));
  }
  const std::lock_guard lock(mutex_);
  if (closed_) throw Unavailable("add: the pool is closed. Make a new one.");
  if (std::ranges::count(devices_, device, [](const Device& one) { return one.facts.name; }) > 0) {
    throw InvalidArgument(
        fmt::format("add: the pool has {} already. restore() takes back a device that is retired.", device));
  }
}

void PoolCore::add(const paceline::Device& device, double memory_bytes, std::unique_ptr<JobQueue> queue,
                   const std::shared_ptr<AddedDevice>& source, AddedDevice& live) {
  check_new(device.name, memory_bytes);
  After after;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Unavailable("add: the pool is closed. Make a new one.");
    plan::PoolDecisions decisions = place({.facts = device, .queue = std::move(queue), .source = source}, memory_bytes);
    source->seat(devices_.size() - 1);
    live.seat(devices_.size() - 1);
    lost_ = nullptr;
    apply(std::move(decisions), after);
    after.room = true;
  }
  follow(std::move(after));
}

Stream* PoolCore::stream(const std::string& device) const {
  const std::lock_guard lock(mutex_);
  const Device& found = devices_[place_of(device, "stream")];
  return found.queue == nullptr ? nullptr : &found.queue->stream();
}

void PoolCore::release() noexcept {
  if (forked()) return;
  const std::lock_guard lock(mutex_);
  for (Device& device : devices_) device.queue.reset();
}

void PoolCore::wake(const Device& device) noexcept {
  if (const auto source = device.source.lock()) {
    source->wake();
  } else {
    WorkSource::wake(device.id);
  }
}

void PoolCore::wake_everyone() noexcept {
  wake_all();
  std::vector<std::shared_ptr<AddedDevice>> sources;
  {
    const std::lock_guard lock(mutex_);
    for (const Device& device : devices_) {
      if (auto source = device.source.lock()) sources.push_back(std::move(source));
    }
  }
  for (const auto& source : sources) source->wake();
}

std::vector<std::string> PoolCore::active() const {
  check_process("active");
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const Device& device : devices_) {
    if (!device.retired && !device.lost) names.push_back(device.facts.name);
  }
  return names;
}

void PoolCore::block(std::size_t place, After& after) {
  devices_[place].blocked = true;
  apply(state_.retire(now(), place, true), after);
  vacate(place, after);
}

void PoolCore::unblock(std::size_t place, After& after) {
  Device& device = devices_[place];
  if (!std::exchange(device.blocked, false) || device.retired || device.lost || cancelling_) return;
  apply(state_.restore(now(), place), after);
}

bool PoolCore::retire(const std::string& device, bool retired, bool unless_last, bool released,
                      double activation_seconds) {
  check_process(retired ? "retire" : "restore");
  After after;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t place = place_of(device, retired ? "retire" : "restore");
    if (retired) {
      if (released && !state_.active(place)) return false;  // its owner has just retired it, or it was lost
      const auto stays = [&](std::size_t other) {
        return other != place && (state_.active(other) || devices_[other].blocked);
      };
      if (unless_last && std::ranges::none_of(std::views::iota(std::size_t{0}, devices_.size()), stays)) return false;
      plan::PoolDecisions decisions = state_.retire(now(), place, released, released ? activation_seconds : kNever);
      devices_[place].retired = true;
      devices_[place].released = released;
      devices_[place].blocked = false;
      apply(std::move(decisions), after);
      vacate(place, after);
    } else {
      devices_[place].retired = devices_[place].lost = devices_[place].blocked = false;
      lost_ = nullptr;
      apply(state_.restore(now(), place), after);
      after.room = true;
    }
  }
  follow(std::move(after));
  return true;
}

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#include "comm/memory_spaces.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/blocking.hpp>

namespace paceline::internal {
namespace {

/// The device whose streams may use all processors of the memory space. A GPU's space has the name of the GPU, of which
/// the group may have only a part. In tests a part may be a space of its own.
Device whole(const Device& device) {
  if (device.name == device.memory_space) return device;
  try {
    return find_device(device.memory_space);
  } catch (const InvalidArgument&) {
    return device;
  }
}

/// Whether the spaces' work ends within `timeout`. @throws what the poll hook of waits throws
bool end_within(std::chrono::nanoseconds timeout, std::span<const Space> spaces) {
  const auto start = std::chrono::steady_clock::now();
  const auto is_done = [](const Space& space) {
    try {
      return space.done == nullptr || space.done->done();
    } catch (const Error&) {
      return true;  // a lost device runs nothing any more
    }
  };
  BlockingRegion region;
  while (!std::all_of(spaces.begin(), spaces.end(), is_done)) {
    if (std::chrono::steady_clock::now() - start > timeout) return false;
    region.poll();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

}  // namespace

MemorySpaces::MemorySpaces(const DeviceGroup& group) : devices_(group.size()), staging_(2) {
  std::map<std::string, std::size_t> known;
  for (std::size_t d = 0; d < group.size(); ++d) {
    const Device& device = group.devices()[d];
    Entry& entry = devices_[d];
    entry.name = device.name;
    entry.device = backend_of(device).open(device);
    if (entry.device == nullptr) {
      host_.push_back(d);
      continue;
    }
    const auto [found, is_new] = known.emplace(device.memory_space, spaces_.size());
    entry.space = found->second;
    if (is_new) {
      Space& space = spaces_.emplace_back();
      space.endpoint.device = whole(device);
      space.endpoint.opened = backend_of(device).open(space.endpoint.device);
      space.endpoint.stream = space.endpoint.opened->make_stream();
    }
    spaces_[entry.space].members.push_back(d);
  }
}

std::vector<Endpoint> MemorySpaces::endpoints() const {
  std::vector<Endpoint> all;
  for (const Space& space : spaces_) all.push_back(space.endpoint);
  return all;
}

std::string MemorySpaces::routes() const {
  std::map<LinkKind, std::vector<std::string>> pairs;
  for (std::size_t s = 0; s < spaces_.size(); ++s) {
    for (std::size_t other = s + 1; other < spaces_.size(); ++other) {
      const Endpoint& one = spaces_[s].endpoint;
      const Endpoint& two = spaces_[other].endpoint;
      pairs[one.opened->link_to(*two.opened)].push_back(fmt::format("{} and {}", one.device.name, two.device.name));
    }
  }
  const auto words = [](LinkKind kind) {
    if (kind == LinkKind::through_host || kind == LinkKind::wrong_peer) return std::string(name_of(kind));
    return fmt::format("by {}{}", name_of(kind), kind == LinkKind::pcie_peer ? " access" : "");
  };
  std::string text;  // the best kind, and then which pairs go otherwise
  for (const auto& [kind, names] : pairs) {
    text += text.empty() ? words(kind) : fmt::format("; between {} {}", fmt::join(names, ", "), words(kind));
  }
  return text;
}

void MemorySpaces::enter(std::span<const BufferView> buffers) {
  for (std::size_t d = 0; d < devices_.size(); ++d) enter(d, buffers[d], spaces_[devices_[d].space]);
}

void MemorySpaces::enter(std::size_t device, const BufferView& buffer, const Space& space) {
  Entry& entry = devices_[device];
  if (entry.device == nullptr) return;
  if (entry.ready == nullptr) entry.ready = entry.device->make_event(false);
  entry.device->adopt_stream(buffer.stream)->record(*entry.ready);
  space.endpoint.stream->wait(*entry.ready);
}

void MemorySpaces::leave(std::span<const BufferView> buffers) {
  for (Space& space : spaces_) record_done(space);
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    if (devices_[d].device == nullptr) continue;
    const std::unique_ptr<Stream> stream = devices_[d].device->adopt_stream(buffers[d].stream);
    for (const Space& space : spaces_) stream->wait(*space.done);
  }
}

void MemorySpaces::record_done(Space& space) {
  if (space.done == nullptr) space.done = space.endpoint.opened->make_event(false);
  space.endpoint.stream->record(*space.done);
}

void MemorySpaces::leave(std::size_t device, const BufferView& buffer, Space& space) {
  record_done(space);
  const Entry& entry = devices_[device];
  if (entry.device != nullptr) entry.device->adopt_stream(buffer.stream)->wait(*space.done);
}

void* MemorySpaces::staging(std::size_t which, std::size_t bytes) {
  std::vector<std::unique_ptr<Buffer>>& buffers = staging_[which];
  if (buffers.empty() || buffers.back()->bytes() < bytes) {
    const std::size_t doubled = buffers.empty() ? 0 : 2 * buffers.back()->bytes();
    buffers.push_back(home().endpoint.opened->allocate_pinned(std::max(bytes, doubled)));
  }
  return buffers.back()->data();
}

void MemorySpaces::wait(std::chrono::nanoseconds timeout) const {
  const auto start = std::chrono::steady_clock::now();
  try {
    for (const Space& space : spaces_) {
      if (space.done == nullptr) continue;
      const auto left = timeout - (std::chrono::steady_clock::now() - start);
      wait_for(*space.done, left);
    }
  } catch (const Timeout&) {
    throw_late(timeout);
  }
}

/// Spaces wait for each other. The late device is the one whose buffer's own stream has not reached the call.
void MemorySpaces::throw_late(std::chrono::nanoseconds timeout) const {
  const double seconds = std::chrono::duration<double>(timeout).count();
  for (const Entry& entry : devices_) {
    if (entry.ready == nullptr || entry.ready->done()) continue;
    throw Timeout(fmt::format("{}: what its buffer's stream was given before the collective has not ended within {:g} "
                              "s. A kernel hangs, or waits for something that does not come; or timeout is too short "
                              "for this work.",
                              entry.name, seconds),
                  entry.name);
  }
  for (const Space& space : spaces_) {
    if (space.done == nullptr || space.done->done()) continue;
    const std::string& name = space.endpoint.device.name;
    throw Timeout(fmt::format("{}: a collective has not ended within {:g} s, though all that it waits for has. The "
                              "device hangs, or does other work; or timeout is too short for this one.",
                              name, seconds),
                  name);
  }
  throw Timeout(fmt::format("a collective has only ended after {:g} s; timeout is too short for it.", seconds));
}

void MemorySpaces::close(std::chrono::nanoseconds timeout) {
  try {
    if (!end_within(timeout, spaces_)) return leak();
  } catch (...) {
    leak();
    throw;
  }
  // Pinned memory first, while none of our work runs: releasing it waits for all work.
  staging_.clear();
  spaces_.clear();
  devices_.clear();
}

void MemorySpaces::leak() noexcept {
  using Kept = std::tuple<decltype(staging_), decltype(spaces_), decltype(devices_)>;
  try {
    static std::mutex mutex;
    static auto* const kept = new std::deque<Kept>;  // never destroyed: it may be in use until the process ends
    const std::lock_guard lock(mutex);
    kept->emplace_back(std::move(staging_), std::move(spaces_), std::move(devices_));
  } catch (...) {  // no memory for the list
  }
  staging_.clear();
  spaces_.clear();
  devices_.clear();
}

}  // namespace paceline::internal

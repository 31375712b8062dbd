// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <map>
#include <string>
#include <utility>

#include <paceline/error.hpp>

#include "comm/link.hpp"
#include "engine/device_queues_state.hpp"

namespace paceline {

void DeviceQueues::State::find_spaces(const DeviceGroup& group) {
  std::map<std::string, std::size_t> known;
  lanes.resize(group.size());
  home = group.size();
  for (std::size_t d = 0; d < group.size(); ++d) {
    const Device& device = group.devices()[d];
    const auto [entry, is_new] = known.emplace(device.memory_space, spaces.size());
    const Backend& backend = backend_of(device);
    lanes[d].space = entry->second;
    lanes[d].device = backend.open(device);
    if (const std::string why = group.size() > 1 ? backend.why_in_turns() : ""; !why.empty()) {
      throw Unavailable(
          fmt::format("DataParallel: {}: several devices would take turns, and collectives hang. Unset it, or use one "
                      "device.",
                      why));
    }
    if (is_new) {
      spaces.emplace_back();
      gpus.emplace_back();
    }
    if (lanes[d].device == nullptr) continue;
    if (is_new) {
      gpus.back() = backend.find(device.memory_space);
      spaces.back().device = backend.open(gpus.back());
    }
    if (home != group.size()) continue;
    home = entry->second;
    one_whole_gpu = group.size() == 1 && device.name == device.memory_space;
  }
  if (home == group.size()) {
    throw InvalidArgument("DeviceQueues: every device of the group works during the call; there is nothing to queue");
  }
}

void DeviceQueues::State::use(void* native) {
  AsyncDevice& device = home_device();
  std::unique_ptr<Stream> before =
      std::exchange(home_stream, native != nullptr ? device.adopt_stream(native) : device.make_stream());
  owns_home_stream = native == nullptr;
  if (before != nullptr) {  // work on the old stream stays before work on the new one
    const std::unique_ptr<Event> moved = device.make_event(false);
    before->record(*moved);
    home_stream->wait(*moved);
  }
  if (one_whole_gpu) lanes.front().stream = home_stream.get();
}

void DeviceQueues::State::open(Lane& lane) {
  if (lane.space != home) lane.source = home_device().make_stream();
  if (lane.device == nullptr) return;
  lane.delivered = lane.device->make_event(false);
  if (lane.stream != nullptr) return;
  lane.own_stream = lane.device->make_stream();
  lane.stream = lane.own_stream.get();
}

void DeviceQueues::State::open(Space& space) {
  AsyncDevice& device = maker(space);
  space.copies = device.make_stream();
  space.arrived = device.make_event(false);
  space.summed = device.make_event(false);
}

void DeviceQueues::State::connect() {
  std::vector<std::size_t> members;
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    if (!on_host(spaces[s])) members.push_back(s);
  }
  if (members.size() < 2) return;
  std::string why_none = "as asked for";
  if (options.collectives.transport != Transport::copies) {
    open(spaces[home]);
    std::vector<internal::Endpoint> endpoints;
    for (const std::size_t s : members) endpoints.push_back({gpus[s], spaces[s].device, spaces[s].copies});
    auto link = internal::make_native_link(endpoints, options.collectives, why_none);
    if (link != nullptr) {
      collectives = std::make_shared<internal::GpuCollectives>(
          std::move(link), std::move(endpoints), std::move(members), home, options.staging_bytes, options.timeout);
      transport = collectives->description();
      return;
    }
    if (options.collectives.transport == Transport::nccl) throw Unavailable("DataParallel: " + why_none);
    spaces[home].copies.reset();
  }
  transport = fmt::format("copies through {} ({})", gpus[home].name, why_none);
}

}  // namespace paceline

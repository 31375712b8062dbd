// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <string>
#include <utility>

#include <paceline/error.hpp>

#include "comm/link.hpp"
#include "engine/queues/device_queues_state.hpp"

namespace paceline {

void DeviceQueues::State::find_spaces(const DeviceGroup& group) {
  if (gpu_spaces() == 0) {
    throw InvalidArgument("DeviceQueues: every device of the group works during the call; there is nothing to queue");
  }
  for (std::size_t d = 0; d < group.size(); ++d) {
    const Device& device = group.devices()[d];
    if (const std::string why = group.size() > 1 ? backend_of(device).why_in_turns() : ""; !why.empty()) {
      throw Unavailable(
          fmt::format("DataParallel: {}: several devices would take turns, and collectives hang. Unset it, or use one "
                      "device.",
                      why));
    }
    Queue& queue = queues.emplace_back();
    queue.space = memory.index_of_space(d);
    queue.device = memory.device(d);
    one_whole_gpu = group.size() == 1 && device.name == device.memory_space;
  }
  for (const internal::Space& space : memory.spaces()) spaces.emplace_back().maker = space.endpoint.opened.get();
  if (!memory.host_devices().empty()) spaces.emplace_back().maker = spaces[kHome].maker;
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
  if (one_whole_gpu) queues.front().stream = home_stream.get();
}

void DeviceQueues::State::open(Queue& queue) {
  if (queue.space != kHome) queue.source = home_device().make_stream();
  if (queue.device == nullptr) return;
  queue.delivered = queue.device->make_event(false);
  if (queue.stream != nullptr) return;
  queue.own_stream = queue.device->make_stream();
  queue.stream = queue.own_stream.get();
}

void DeviceQueues::State::open(Space& space, Stream& copies) {
  space.copies = &copies;
  space.arrived = space.maker->make_event(false);
  space.summed = space.maker->make_event(false);
}

void DeviceQueues::State::connect() {
  if (gpu_spaces() < 2) return;
  std::string why_none = "as asked for";
  std::vector<internal::Endpoint> endpoints = memory.endpoints();
  if (options.collectives.transport != Transport::copies) {
    auto link = internal::make_native_link(endpoints, options.collectives, why_none);
    if (link != nullptr) {
      open(spaces[kHome], *endpoints[kHome].stream);
      collectives =
          std::make_shared<internal::SpaceCollectives>(std::move(link), std::move(endpoints), options.staging_bytes);
      transport = collectives->description();
      return;
    }
    if (options.collectives.transport == Transport::nccl) throw Unavailable("DataParallel: " + why_none);
  }
  transport = fmt::format("copies through {} ({})", endpoints[kHome].device.name, why_none);
}

}  // namespace paceline

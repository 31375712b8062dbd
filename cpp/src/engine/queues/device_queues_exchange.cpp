// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>

#include <paceline/error.hpp>

#include "engine/queues/device_queues_state.hpp"

namespace paceline {
namespace {

std::size_t bytes_of(const BufferView& part) { return part.count * size_of(part.dtype); }

/// The k-th buffer of a list, with at least this size.
void* reserve(std::vector<std::unique_ptr<Buffer>>& buffers, std::size_t k, std::size_t bytes, AsyncDevice& device,
              Stream& stream) {
  if (buffers.size() <= k) buffers.resize(k + 1);
  return internal::reserve(buffers[k], bytes, device, stream);
}

}  // namespace

void DeviceQueues::State::distribute(std::span<const SpaceCopy> copies) {
  home_stream->record(*ready);
  for (Space& space : spaces) {
    if (space.copies != nullptr && space.takes_part) space.copies->wait(*ready);
  }
  if (collectives != nullptr) collectives->broadcast(copies);
  for (const SpaceCopy& copy : copies) {
    const Space& space = spaces[copy.space];
    const bool copied = collectives == nullptr || on_host(copy.space);
    if (copied && space.takes_part) space.copies->copy(copy.to, copy.from, copy.bytes);
  }
  for (Space& space : spaces) {
    if (space.copies != nullptr && space.takes_part) space.copies->record(*space.arrived);
  }
}

/// Makes the space's stream wait for what its devices have delivered.
std::vector<const DeviceQueues::State::Queue*> DeviceQueues::State::gather(Space& space, std::size_t index) {
  std::vector<const Queue*> here;
  for (const Queue& queue : queues) {
    if (!queue.has_delivered || queue.space != index) continue;
    here.push_back(&queue);
    if (queue.stream != nullptr) space.copies->wait(*queue.delivered);
  }
  home_stream->wait(*space.arrived);
  return here;
}

void DeviceQueues::State::collect(std::span<const BufferView> outputs, std::vector<std::vector<const void*>>& inputs) {
  collectives->check();  // after a failed broadcast, for example, there is nothing to sum
  std::vector<std::size_t> sizes;
  for (const BufferView& output : outputs) sizes.push_back(bytes_of(output));
  collectives->reserve(sizes);
  for (std::size_t s = 0; s < gpu_spaces(); ++s) {
    Space& space = spaces[s];
    const std::vector<const Queue*> here = gather(space, s);
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      void* const sum = collectives->sum(s, k);
      std::vector<const void*> addends;
      for (const Queue* queue : here) addends.push_back(queue->parts[k].data);
      if (addends.empty()) {
        space.copies->zero(sum, sizes[k]);
      } else {
        space.copies->reduce({addends, sum, outputs[k].count, outputs[k].dtype, 1.0});
      }
    }
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (outputs[k].count > 0) collectives->reduce(k, outputs[k].count, outputs[k].dtype);
  }
  for (std::size_t s = 0; s < gpu_spaces(); ++s) {
    spaces[s].copies->record(*spaces[s].summed);
    home_stream->wait(*spaces[s].summed);
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) inputs[k].push_back(collectives->sum(kHome, k));
}

void DeviceQueues::State::bring_home(Space& space, std::size_t index, std::vector<std::vector<const void*>>& inputs) {
  const std::vector<const Queue*> here = gather(space, index);
  if (here.empty()) return;
  if (inputs.empty()) {  // nothing to sum, but the caller's work comes after theirs
    space.copies->record(*space.summed);
    home_stream->wait(*space.summed);
    return;
  }
  const std::size_t part_count = inputs.size();
  std::vector<std::vector<BufferView>> coming(part_count);
  for (std::size_t k = 0; k < part_count; ++k) {
    for (const Queue* queue : here) coming[k].push_back(queue->parts[k]);
  }
  if (!on_host(index)) {
    for (std::size_t k = 0; k < part_count; ++k) {
      BufferView sum = coming[k].front();
      sum.data = reserve(space.sums, k, bytes_of(sum), *space.maker, *space.copies);
      std::vector<const void*> addends;
      for (const BufferView& part : coming[k]) addends.push_back(part.data);
      space.copies->reduce({addends, sum.data, sum.count, sum.dtype, 1.0});
      coming[k] = {sum};
    }
    space.copies->record(*space.summed);
    home_stream->wait(*space.summed);
  }
  std::size_t next = 0;
  for (std::size_t k = 0; k < part_count; ++k) {
    for (const BufferView& part : coming[k]) {
      void* const landed = reserve(space.landed, next++, bytes_of(part), home_device(), *home_stream);
      home_stream->copy(landed, part.data, bytes_of(part));
      inputs[k].push_back(landed);
    }
  }
}

void DeviceQueues::State::await(const Event& event) {
  try {
    wait_for(event, options.timeout);
  } catch (const Timeout&) {
    hung = true;
    throw;
  }
}

void DeviceQueues::State::drain(AsyncDevice* device, Stream* stream) {
  if (device == nullptr || stream == nullptr || hung) return;
  try {
    const std::unique_ptr<Event> event = device->make_event(false);
    stream->record(*event);
    await(*event);
  } catch (const Error&) {
  }
}

}  // namespace paceline

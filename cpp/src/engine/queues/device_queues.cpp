// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/device_queues.hpp>

#include <algorithm>
#include <string>
#include <utility>

#include <paceline/error.hpp>

#include "engine/queues/device_queues_state.hpp"

namespace paceline {

DeviceQueues::DeviceQueues(const DeviceGroup& group, const DeviceQueueOptions& options)
    : state_(std::make_unique<State>(group)) {
  State& state = *state_;
  state.options = options;
  state.run_ahead = static_cast<std::size_t>(std::max<std::int64_t>(options.run_ahead, 0));
  state.find_spaces(group);
  state.use(options.stream);
  state.ready = state.home_device().make_event(false);
  for (State::Queue& queue : state.queues) state.open(queue);
  for (std::size_t s = 0; s < state.spaces.size(); ++s) {
    if (s == State::kHome) continue;
    if (state.on_host(s)) state.host_copies = state.home_device().make_stream();
    state.open(state.spaces[s], state.on_host(s) ? *state.host_copies : *state.memory.spaces()[s].endpoint.stream);
  }
  state.connect();
}

DeviceQueues::~DeviceQueues() {
  try {
    drain();
  } catch (...) {  // interrupted: everything returns in the order of the streams
  }
}

std::size_t DeviceQueues::device_count() const noexcept { return state_->queues.size(); }
std::size_t DeviceQueues::space_count() const noexcept { return state_->spaces.size(); }
std::size_t DeviceQueues::home_space() const noexcept { return State::kHome; }
std::size_t DeviceQueues::space_of(DeviceId device) const noexcept { return state_->queues[device].space; }
bool DeviceQueues::on_host(std::size_t space) const noexcept { return state_->on_host(space); }
std::string DeviceQueues::transport() const { return state_->transport; }

std::unique_ptr<Buffer> DeviceQueues::allocate(std::size_t space, std::size_t bytes, Stream* stream) const {
  State& state = *state_;
  AsyncDevice& device = maker(space);
  if (on_host(space)) return device.allocate_pinned(bytes);
  return state.collectives != nullptr ? state.collectives->allocate(space, bytes, *stream)
                                      : device.allocate(bytes, *stream);
}

AsyncDevice& DeviceQueues::maker(std::size_t space) const noexcept { return *state_->spaces[space].maker; }
Stream& DeviceQueues::home_stream() const noexcept { return *state_->home_stream; }
Stream* DeviceQueues::copy_stream(std::size_t space) const noexcept { return state_->spaces[space].copies; }
Stream* DeviceQueues::stream(DeviceId device) const noexcept { return state_->queues[device].stream; }
Stream* DeviceQueues::source_stream(DeviceId device) const noexcept { return state_->queues[device].source.get(); }

void DeviceQueues::set_stream(void* native) {
  if (native == nullptr ? state_->owns_home_stream : native == state_->home_stream->native()) return;
  // The buffers at home for the old stream's reductions return in its order.
  for (State::Space& space : state_->spaces) space.landed.clear();
  state_->use(native);
}

std::shared_ptr<const StepTimes> DeviceQueues::begin_step(std::span<const SpaceCopy> copies) {
  State& state = *state_;
  if (state.left) drain();
  if (state.hung) {
    throw DeviceLost(
        "step: a device did not end what an earlier step gave it, and may still be at it. Start a new process.");
  }
  if (state.collectives != nullptr) state.collectives->check();
  state.step = std::make_shared<internal::RecordedTimes>(state.times, state.queues.size(), state.home_device(),
                                                         state.options.timeout, state.collectives);
  for (State::Queue& queue : state.queues) {
    queue.entered = false;
    queue.has_delivered = false;
    queue.parts.clear();
  }
  try {
    state.distribute(copies);
  } catch (...) {
    drain();  // nobody else would: the step has not begun
    throw;
  }
  return state.step;
}

bool DeviceQueues::enter(DeviceId device) {
  State& state = *state_;
  State::Queue& queue = state.queues[device];
  if (std::exchange(queue.entered, true)) return false;
  if (queue.source != nullptr) queue.source->wait(*state.ready);
  if (queue.stream == nullptr) {
    state.await(state.arrival(queue));
  } else if (queue.own_stream != nullptr) {
    queue.stream->wait(state.arrival(queue));
  }
  return true;
}

const Event* DeviceQueues::slot(DeviceId device) const { return state_->step->end_of_run(device, state_->run_ahead); }

const Event* DeviceQueues::idle(DeviceId device) const { return state_->step->end_of_run(device, 0); }

std::chrono::nanoseconds DeviceQueues::patience() const noexcept { return state_->options.timeout; }

void DeviceQueues::give_up(const Event& event) {
  state_->hung = true;
  throw_late(event, state_->options.timeout);
}

bool DeviceQueues::begin_run(DeviceId device, bool continues) {
  State::Queue& queue = state_->queues[device];
  return queue.stream != nullptr && state_->step->begin_run(device, *queue.device, *queue.stream, continues);
}

void DeviceQueues::restart_run(DeviceId device) {
  State::Queue& queue = state_->queues[device];
  if (queue.stream != nullptr) state_->step->restart_run(device, *queue.stream);
}

void DeviceQueues::end_run(DeviceId device) {
  State::Queue& queue = state_->queues[device];
  if (queue.stream != nullptr) state_->step->end_run(device, *queue.stream);
}

void DeviceQueues::deliver(DeviceId device, std::vector<BufferView> parts) {
  State::Queue& queue = state_->queues[device];
  queue.parts = std::move(parts);
  queue.has_delivered = true;
  if (queue.stream != nullptr) queue.stream->record(*queue.delivered);
}

void DeviceQueues::reduce(std::span<const BufferView> outputs, double scale) {
  State& state = *state_;
  std::vector<std::vector<const void*>> inputs(outputs.size());
  const bool collects = state.collectives != nullptr && !outputs.empty();
  if (collects) state.collect(outputs, inputs);
  for (std::size_t s = 0; s < state.spaces.size(); ++s) {
    if (collects ? state.on_host(s) : state.spaces[s].copies != nullptr) {
      state.bring_home(state.spaces[s], s, inputs);
    }
  }
  for (State::Queue& queue : state.queues) {
    if (collects || !queue.has_delivered || queue.space != State::kHome) continue;
    if (queue.own_stream != nullptr) state.home_stream->wait(*queue.delivered);
    for (std::size_t k = 0; k < outputs.size(); ++k) inputs[k].push_back(queue.parts[k].data);
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (inputs[k].empty()) continue;
    const BufferView& output = outputs[k];
    state.home_stream->reduce({inputs[k], output.data, output.count, output.dtype, scale});
  }
}

void DeviceQueues::end_step() { state_->home_stream->record(state_->step->over()); }

void DeviceQueues::drain() {
  State& state = *state_;
  state.left = true;
  if (state.collectives != nullptr && state.collectives->lost()) state.hung = true;
  for (State::Queue& queue : state.queues) state.drain(queue.device, queue.stream);
  for (State::Queue& queue : state.queues) state.drain(&state.home_device(), queue.source.get());
  for (State::Space& space : state.spaces) state.drain(space.maker, space.copies);
  state.drain(&state.home_device(), state.home_stream.get());
  state.left = false;
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/device_queues.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

#include "comm/link.hpp"
#include "comm/memory_spaces.hpp"
#include "comm/space_collectives.hpp"
#include "engine/queues/step_times.hpp"

namespace paceline {
namespace {

constexpr std::size_t kHome = 0;

using Inputs = std::vector<std::vector<const void*>>;  // what goes into each output

std::size_t bytes_of(const BufferView& part) { return part.count * size_of(part.dtype); }

/// The k-th buffer of a list, with at least this size.
void* reserve(std::vector<std::unique_ptr<Buffer>>& buffers, std::size_t k, std::size_t bytes, AsyncDevice& device,
              Stream& stream) {
  if (buffers.size() <= k) buffers.resize(k + 1);
  return internal::reserve(buffers[k], bytes, device, stream);
}

}  // namespace

/// The streams of a group by device (queues) and by memory space, and what a step enqueues on them.
struct DeviceQueues::State {
  struct Queue {
    std::size_t space = 0;
    AsyncDevice* device = nullptr;  // null on the host
    Stream* stream = nullptr;       // null on the host; the home stream if there is only one device
    std::unique_ptr<Stream> own_stream{};
    std::unique_ptr<Stream> source{};
    std::unique_ptr<Event> delivered{};
    std::optional<std::vector<BufferView>> parts{};  // none before it has delivered
    bool entered = false;
  };

  struct Space {
    // The whole GPU, even if its devices are parts, because work for all of them must not run on one part only. Home's
    // for the host.
    AsyncDevice* maker = nullptr;
    std::shared_ptr<Stream> copies{};  // null at home without collectives
    std::unique_ptr<Event> arrived{};  // the parameters
    std::unique_ptr<Event> summed{};
    bool takes_part = true;                         // in this step
    std::vector<std::unique_ptr<Buffer>> sums{};    // one for each part that its queues deliver; none on the host
    std::vector<std::unique_ptr<Buffer>> landed{};  // at home, one for each part that arrives
  };

  State(const DeviceGroup& group, const DeviceQueueOptions& the_options) : options(the_options), memory(group) {
    find_spaces(group);
    use(options.stream);
    ready = home_device().make_event(false);
    for (Queue& queue : queues) open(queue);
    for (std::size_t s = 1; s < spaces.size(); ++s) {
      open(spaces[s], on_host(s) ? home_device().make_stream() : memory.spaces()[s].endpoint.stream);
    }
    if (gpu_space_count() > 1) connect();
  }

  [[nodiscard]] std::size_t gpu_space_count() { return memory.spaces().size(); }
  [[nodiscard]] bool on_host(std::size_t space) { return space == gpu_space_count(); }
  [[nodiscard]] AsyncDevice& home_device() const { return *spaces[kHome].maker; }

  void find_spaces(const DeviceGroup& group) {
    if (gpu_space_count() == 0) {
      throw InvalidArgument("DeviceQueues: every device of the group works during the call; there is nothing to queue");
    }
    for (std::size_t d = 0; d < group.size(); ++d) {
      const Device& device = group.devices()[d];
      if (const std::string why = group.size() > 1 ? backend_of(device).why_in_turns() : ""; !why.empty()) {
        throw Unavailable(
            fmt::format("DataParallel: {}: several devices would take turns, and collectives hang. Unset it, or use "
                        "one device.",
                        why));
      }
      queues.push_back({.space = memory.index_of_space(d), .device = memory.device(d)});
      one_whole_gpu = group.size() == 1 && device.name == device.memory_space;
    }
    for (const internal::Space& space : memory.spaces()) spaces.push_back({.maker = space.endpoint.opened.get()});
    if (!memory.host_devices().empty()) spaces.push_back({.maker = &home_device()});
  }

  /// Orders steps on this stream of the caller from now on; null: on one of our own.
  void use(void* native) {
    AsyncDevice& device = home_device();
    const std::unique_ptr<Stream> before =
        std::exchange(home_stream, native != nullptr ? device.adopt_stream(native) : device.make_stream());
    owns_home_stream = native == nullptr;
    if (before != nullptr) {  // work on the old stream stays before work on the new one
      const std::unique_ptr<Event> moved = device.make_event(false);
      before->record(*moved);
      home_stream->wait(*moved);
    }
    if (one_whole_gpu) queues.front().stream = home_stream.get();
  }

  void open(Queue& queue) {
    if (queue.space != kHome) queue.source = home_device().make_stream();
    if (queue.device == nullptr) return;
    queue.delivered = queue.device->make_event(false);
    if (queue.stream != nullptr) return;
    queue.own_stream = queue.device->make_stream();
    queue.stream = queue.own_stream.get();
  }

  static void open(Space& space, std::shared_ptr<Stream> copies) {
    space.copies = std::move(copies);
    space.arrived = space.maker->make_event(false);
    space.summed = space.maker->make_event(false);
  }

  /// Connects several GPUs.
  void connect() {
    std::string why_none = "as asked for";
    std::vector<internal::Endpoint> endpoints = memory.endpoints();
    if (options.collectives.transport != Transport::copies) {
      auto link = internal::make_native_link(endpoints, options.collectives, why_none);
      if (link != nullptr) {
        open(spaces[kHome], endpoints[kHome].stream);
        collectives =
            std::make_shared<internal::SpaceCollectives>(std::move(link), std::move(endpoints), options.staging_bytes);
        transport = collectives->description();
        return;
      }
      if (options.collectives.transport == Transport::nccl) throw Unavailable("DataParallel: " + why_none);
    }
    transport = fmt::format("copies through {} ({})", endpoints[kHome].device.name, why_none);
  }

  void begin(const std::vector<bool>& takes_part) {
    for (std::size_t s = 0; s < spaces.size(); ++s) spaces[s].takes_part = collectives != nullptr && !on_host(s);
    for (std::size_t d = 0; d < queues.size(); ++d) {
      queues[d].entered = false;
      queues[d].parts.reset();
      if (takes_part.empty() || takes_part[d]) spaces[queues[d].space].takes_part = true;
    }
  }

  /// Copies home's parameters to the other spaces, once they are ready.
  void distribute(std::span<const SpaceCopy> copies) {
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
  std::vector<const Queue*> gather(Space& space, std::size_t index) {
    std::vector<const Queue*> here;
    for (const Queue& queue : queues) {
      if (!queue.parts || queue.space != index) continue;
      here.push_back(&queue);
      if (queue.stream != nullptr) space.copies->wait(*queue.delivered);
    }
    home_stream->wait(*space.arrived);
    return here;
  }

  /// What these queues have delivered as their k-th part.
  static std::vector<const void*> parts_of(std::span<const Queue* const> here, std::size_t k) {
    std::vector<const void*> parts;
    for (const Queue* queue : here) parts.push_back((*queue->parts)[k].data);
    return parts;
  }

  /// Sums the parts of all GPUs' devices at home.
  void collect(std::span<const BufferView> outputs, Inputs& inputs) {
    collectives->check();  // after a failed broadcast, for example, there is nothing to sum
    std::vector<std::size_t> sizes;
    for (const BufferView& output : outputs) sizes.push_back(bytes_of(output));
    collectives->reserve(sizes);
    for (std::size_t s = 0; s < gpu_space_count(); ++s) {
      Space& space = spaces[s];
      const std::vector<const Queue*> here = gather(space, s);
      for (std::size_t k = 0; k < outputs.size(); ++k) {
        void* const sum = collectives->sum(s, k);
        if (here.empty()) {
          space.copies->zero(sum, sizes[k]);
        } else {
          space.copies->reduce({parts_of(here, k), sum, outputs[k].count, outputs[k].dtype, 1.0});
        }
      }
    }
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (outputs[k].count > 0) collectives->reduce(k, outputs[k].count, outputs[k].dtype);
      inputs[k].push_back(collectives->sum(kHome, k));
    }
    for (std::size_t s = 0; s < gpu_space_count(); ++s) {
      spaces[s].copies->record(*spaces[s].summed);
      home_stream->wait(*spaces[s].summed);
    }
  }

  void bring_home(Space& space, std::size_t index, Inputs& inputs) {
    const std::vector<const Queue*> here = gather(space, index);
    if (here.empty()) return;
    const auto& like = *here.front()->parts;
    Inputs coming;
    for (std::size_t k = 0; k < inputs.size(); ++k) coming.push_back(parts_of(here, k));
    if (!on_host(index)) {
      for (std::size_t k = 0; k < inputs.size(); ++k) {
        void* const sum = reserve(space.sums, k, bytes_of(like[k]), *space.maker, *space.copies);
        space.copies->reduce({coming[k], sum, like[k].count, like[k].dtype, 1.0});
        coming[k] = {sum};
      }
      // If there is nothing to sum, the caller's work still comes after the devices'.
      space.copies->record(*space.summed);
      home_stream->wait(*space.summed);
    }
    std::size_t next = 0;
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      for (const void* const part : coming[k]) {
        void* const landed = reserve(space.landed, next++, bytes_of(like[k]), home_device(), *home_stream);
        home_stream->copy(landed, part, bytes_of(like[k]));
        inputs[k].push_back(landed);
      }
    }
  }

  /// Waits, and remembers a hang, because every later wait would take as long again.
  void await(const Event& event) {
    try {
      wait_for(event, options.timeout);
    } catch (const Timeout&) {
      hung = true;
      throw;
    }
  }

  /// Waits until the stream has no work left. A device that fails here has none left either.
  void drain(AsyncDevice* device, Stream* stream) {
    if (device == nullptr || stream == nullptr || hung) return;
    try {
      const std::unique_ptr<Event> event = device->make_event(false);
      stream->record(*event);
      await(*event);
    } catch (const Error&) {
    }
  }

  DeviceQueueOptions options;
  internal::MemorySpaces memory;
  bool one_whole_gpu = false;  // the only device, which computes on the home stream
  std::vector<Queue> queues;
  std::vector<Space> spaces;  // home's first, the host's last
  std::string transport;
  std::shared_ptr<internal::SpaceCollectives> collectives;  // null: copies are used
  std::unique_ptr<Stream> home_stream;
  bool owns_home_stream = false;
  std::unique_ptr<Event> ready;
  std::shared_ptr<internal::Evidence> evidence = std::make_shared<internal::Evidence>();  // of all steps
  std::shared_ptr<internal::SpareEvents> spare_events = std::make_shared<internal::SpareEvents>();
  std::shared_ptr<internal::RecordedTimes> step;
  std::atomic<bool> hung{false};
  bool left = false;  // a drain did not end
};

DeviceQueues::DeviceQueues(const DeviceGroup& group, const DeviceQueueOptions& options)
    : state_(std::make_unique<State>(group, options)) {}

DeviceQueues::~DeviceQueues() {
  try {
    drain();
  } catch (...) {  // interrupted: everything returns in the order of the streams
  }
}

std::size_t DeviceQueues::device_count() const noexcept { return state_->queues.size(); }
std::size_t DeviceQueues::space_count() const noexcept { return state_->spaces.size(); }
std::size_t DeviceQueues::home_space() const noexcept { return kHome; }
std::size_t DeviceQueues::space_of(DeviceId device) const noexcept { return state_->queues[device].space; }
bool DeviceQueues::on_host(std::size_t space) const noexcept { return state_->on_host(space); }
std::string DeviceQueues::transport() const { return state_->transport; }

std::unique_ptr<Buffer> DeviceQueues::allocate(std::size_t space, std::size_t bytes, Stream* stream) const {
  if (on_host(space)) return maker(space).allocate_pinned(bytes);
  return state_->collectives != nullptr ? state_->collectives->allocate(space, bytes, *stream)
                                        : maker(space).allocate(bytes, *stream);
}

void DeviceQueues::release_memory() {
  for (std::size_t s = 0; s < state_->gpu_space_count(); ++s) maker(s).release_memory();
}

AsyncDevice& DeviceQueues::maker(std::size_t space) const noexcept { return *state_->spaces[space].maker; }
Stream& DeviceQueues::home_stream() const noexcept { return *state_->home_stream; }
Stream* DeviceQueues::copy_stream(std::size_t space) const noexcept { return state_->spaces[space].copies.get(); }
Stream* DeviceQueues::stream(DeviceId device) const noexcept { return state_->queues[device].stream; }
Stream* DeviceQueues::source_stream(DeviceId device) const noexcept { return state_->queues[device].source.get(); }

void DeviceQueues::set_stream(void* native) {
  if (native == nullptr ? state_->owns_home_stream : native == state_->home_stream->native()) return;
  // The buffers at home for the old stream's reductions return in its order.
  for (State::Space& space : state_->spaces) space.landed.clear();
  state_->use(native);
}

std::shared_ptr<const StepTimes> DeviceQueues::begin_step(std::span<const SpaceCopy> copies,
                                                          const std::vector<bool>& takes_part) {
  State& state = *state_;
  if (state.left) drain();
  if (state.hung) {
    throw DeviceLost(
        "step: a device did not end what an earlier step gave it, and may still be at it. Start a new process.");
  }
  if (state.collectives != nullptr) state.collectives->check();
  state.step = std::make_shared<internal::RecordedTimes>(state.evidence, state.spare_events, state.queues.size(),
                                                         state.home_device(), state.options.timeout, state.collectives);
  state.begin(takes_part);
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
  const Event& arrival = queue.space == kHome ? *state.ready : *state.spaces[queue.space].arrived;
  if (queue.source != nullptr) queue.source->wait(*state.ready);
  if (queue.stream == nullptr) {
    state.await(arrival);
  } else if (queue.own_stream != nullptr) {
    queue.stream->wait(arrival);
  }
  return true;
}

const Event* DeviceQueues::slot(DeviceId device) const {
  return state_->step->end_of_run(device,
                                  static_cast<std::size_t>(std::max<std::int64_t>(state_->options.run_ahead, 0)));
}
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
  if (queue.stream != nullptr) queue.stream->record(*queue.delivered);
}

void DeviceQueues::reduce(std::span<const BufferView> outputs, double scale) {
  State& state = *state_;
  Inputs inputs(outputs.size());
  const bool collects = state.collectives != nullptr && !outputs.empty();
  if (collects) state.collect(outputs, inputs);
  for (std::size_t s = 0; s < state.spaces.size(); ++s) {
    State::Space& space = state.spaces[s];
    const bool comes = collects ? state.on_host(s) : space.copies != nullptr;
    if (comes && space.takes_part) state.bring_home(space, s, inputs);
  }
  for (State::Queue& queue : state.queues) {
    if (collects || !queue.parts || queue.space != kHome) continue;
    if (queue.own_stream != nullptr) state.home_stream->wait(*queue.delivered);
    for (std::size_t k = 0; k < outputs.size(); ++k) inputs[k].push_back((*queue.parts)[k].data);
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    const BufferView& output = outputs[k];
    if (!inputs[k].empty()) state.home_stream->reduce({inputs[k], output.data, output.count, output.dtype, scale});
  }
}

void DeviceQueues::end_step() { state_->home_stream->record(state_->step->over()); }

void DeviceQueues::drain() {
  State& state = *state_;
  state.left = true;
  if (state.collectives != nullptr && state.collectives->lost()) state.hung = true;
  for (State::Queue& queue : state.queues) state.drain(queue.device, queue.stream);
  for (State::Queue& queue : state.queues) state.drain(&state.home_device(), queue.source.get());
  for (State::Space& space : state.spaces) state.drain(space.maker, space.copies.get());
  state.drain(&state.home_device(), state.home_stream.get());
  state.left = false;
}

}  // namespace paceline

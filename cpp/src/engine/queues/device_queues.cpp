// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/device_queues.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

#include "comm/link.hpp"
#include "comm/measured_links.hpp"
#include "engine/queues/queue_state.hpp"

namespace paceline {
namespace {

// From so many GPUs on a bucket takes so many calls of the driver that the thread which seals last would be late.
constexpr std::size_t kManyGpus = 4;
// For the end of a thread that mostly is idle, or whose call nobody wants to wait for.
constexpr std::chrono::nanoseconds kAfterAHang = std::chrono::seconds(1);

std::size_t bytes_of(const BufferView& part) { return part.count * size_of(part.dtype); }

}  // namespace

DeviceQueues::State::State(const DeviceGroup& group, const DeviceQueueOptions& the_options)
    : options(the_options), memory(group) {
  if (const DType type = options.reduce_dtype.value_or(DType::bfloat16);
      type != DType::bfloat16 && type != DType::float16) {
    throw InvalidArgument(
        fmt::format("DataParallel: reduce_dtype is {}; use bfloat16 or float16, or none.", name_of(type)));
  }
  find_spaces(group);
  use(options.stream);
  ready = home_device().make_event(false);
  for (auto& [id, queue] : queues) open(queue);
  for (std::size_t s = 1; s < spaces.size(); ++s) {
    open(spaces[s], on_host(s) ? home_device().make_stream() : memory.spaces()[s].endpoint.stream);
  }
  if (gpu_space_count() > 1) connect();
  prepare_sums();
}

void DeviceQueues::State::find_spaces(const DeviceGroup& group) {
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
    queues.add(group.ids()[d], {.space = memory.index_of_space(d), .device = memory.device(d)});
    one_whole_gpu = group.size() == 1 && device.part < 0 && device.name == device.memory_space;
  }
  for (const internal::Space& space : memory.spaces()) spaces.push_back({.maker = space.endpoint.opened.get()});
  if (!memory.host_devices().empty()) spaces.push_back({.maker = &home_device()});
}

void DeviceQueues::State::use(NativeStream native) {
  settle();
  AsyncDevice& device = home_device();
  const std::unique_ptr<Stream> before =
      std::exchange(home_stream, native != nullptr ? device.adopt_stream(native) : device.make_stream());
  owns_home_stream = native == nullptr;
  if (before != nullptr) {  // work on the old stream stays before work on the new one
    const std::unique_ptr<Event> moved = device.make_event(false);
    before->record(*moved);
    home_stream->wait(*moved);
  }
  if (one_whole_gpu) queues.begin()->value.stream = home_stream.get();
  if (sums.has_value()) sums->use(*home_stream);
}

void DeviceQueues::State::open(Queue& queue) {
  if (queue.space != kHome) queue.source = home_device().make_stream();
  if (queue.device == nullptr) return;
  queue.delivered = queue.device->make_event(false);
  if (queue.stream != nullptr) return;
  queue.own_stream = queue.device->make_stream();
  queue.stream = queue.own_stream.get();
}

void DeviceQueues::State::open(Space& space, std::shared_ptr<Stream> copies) {
  space.copies = std::move(copies);
  space.arrived = space.maker->make_event(false);
  space.relayed = space.maker->make_event(false);
  space.summed = space.maker->make_event(false);
}

void DeviceQueues::State::connect() {
  if (options.collectives.transport != Transport::nccl) {
    const std::string in = options.reduce_dtype.has_value()
                               ? fmt::format("float32 gradients in {}, ", name_of(*options.reduce_dtype))
                               : "";
    transport = fmt::format("copies, each bucket while the devices still compute, {}{}", in, memory.routes());
    if (options.measure_links) links = internal::known_links(memory.endpoints());
    const std::size_t others = gpu_space_count() - 1;
    if (others < 2) return;
    const auto by_host = [&](const internal::Space& space) { return !home_device().accesses(*space.endpoint.opened); };
    if (std::ranges::all_of(memory.spaces().subspan(1), by_host)) {
      relays = false;  // the first GPU sends each byte once even so
      transport += ", parameters copied to the host once for all GPUs";
      return;
    }
    if (!options.measure_links) return;
    const double first_hop = links.pairs.front().used_bytes_per_second();
    relays = relays_pay(others, links.spread_bytes_per_second, std::min(first_hop, links.exchange_bytes_per_second));
    transport += relays ? ", parameters relayed from GPU to GPU" : ", all parameters from the first GPU";
    return;
  }
  if (options.reduce_dtype.has_value()) {
    throw InvalidArgument(
        "DataParallel: reduce_dtype together with transport 'nccl': NCCL would not only send, but add in that type. "
        "Use "
        "'copies' (the default), which add in float32, or leave reduce_dtype out.");
  }
  std::string why_none;
  std::vector<internal::Endpoint> endpoints = memory.endpoints();
  auto link = internal::make_native_link(endpoints, options.collectives, why_none);
  if (link == nullptr) throw Unavailable("DataParallel: " + why_none);
  open(spaces[kHome], endpoints[kHome].stream);
  collectives =
      std::make_shared<internal::SpaceCollectives>(std::move(link), std::move(endpoints), options.staging_bytes);
  transport = fmt::format("{}, after the devices' last work", collectives->description());
}

void DeviceQueues::State::prepare_sums() {
  std::vector<internal::SumSpace> where;
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    where.push_back({spaces[s].maker, on_host(s) ? nullptr : s == kHome ? home_stream.get() : spaces[s].copies.get()});
  }
  std::vector<internal::SumSource> from;
  for (const auto& [id, queue] : queues) {
    from.push_back({queue.space, queue.device, queue.own_stream.get()});
  }
  if (collectives != nullptr) from.push_back({.space = kHome});
  const bool many = gpu_space_count() >= kManyGpus;
  // Each chunk is cut into a slice for each GPU but home, and enqueuing takes as long for a small one.
  const std::size_t chunk_bytes = many ? 2 * options.chunk_bytes : options.chunk_bytes;
  std::optional<std::chrono::nanoseconds> pump;
  if (many && collectives == nullptr) pump = options.timeout;
  sums.emplace(std::move(where), from, chunk_bytes, options.reduce_dtype, pump);
  sums->use(*home_stream);
}

void DeviceQueues::State::begin(std::vector<bool> takes_part) {
  for (std::size_t s = 0; s < spaces.size(); ++s) spaces[s].takes_part = collectives != nullptr && !on_host(s);
  takes_part.resize(queues.size(), takes_part.empty());
  for (std::size_t place = 0; auto& [id, queue] : queues) {
    queue.entered = queue.has_delivered = false;
    queue.parts.clear();
    if (takes_part[place++]) spaces[queue.space].takes_part = true;
  }
  if (collectives != nullptr) {
    for (std::size_t place = 0; const auto& [id, queue] : queues) {
      takes_part[place] = takes_part[place] && on_host(queue.space);
      ++place;
    }
    takes_part.push_back(true);
  }
  outputs.clear();
  sums->begin(takes_part);
}

void DeviceQueues::State::expect(std::span<const BufferView> the_outputs, double scale) {
  outputs.assign(the_outputs.begin(), the_outputs.end());
  sums->expect(outputs, scale);
}

void DeviceQueues::State::seal(DeviceId device, std::size_t k, const BufferView& bucket, NativeEvent written) {
  Queue& queue = queues[device];
  if (collectives == nullptr || queue.device == nullptr) return sums->seal(queues.place(device), k, bucket, written);
  if (queue.parts.size() <= k) queue.parts.resize(k + 1);
  queue.parts[k] = bucket;
}

std::vector<const void*> DeviceQueues::State::parts_in(std::size_t space, std::size_t k) const {
  std::vector<const void*> parts;
  for (const auto& [id, queue] : queues) {
    if (queue.space == space && k < queue.parts.size()) parts.push_back(queue.parts[k].data);
  }
  return parts;
}

void DeviceQueues::State::collect() {
  collectives->check();  // after a failed broadcast, for example, there is nothing to sum
  std::vector<std::size_t> sizes;
  for (const BufferView& output : outputs) sizes.push_back(bytes_of(output));
  collectives->reserve(sizes);
  for (const auto& [id, queue] : queues) {
    if (queue.has_delivered && queue.stream != nullptr) spaces[queue.space].copies->wait(*queue.delivered);
  }
  for (std::size_t s = 0; s < gpu_space_count(); ++s) {
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      void* const sum = collectives->sum(s, k);
      if (const std::vector<const void*> parts = parts_in(s, k); !parts.empty()) {
        spaces[s].copies->reduce({parts, sum, outputs[k].count, outputs[k].dtype, 1.0});
      } else {
        spaces[s].copies->zero(sum, sizes[k]);
      }
    }
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (outputs[k].count > 0) collectives->reduce(k, outputs[k].count, outputs[k].dtype);
  }
  for (std::size_t s = 0; s < gpu_space_count(); ++s) {
    spaces[s].copies->record(*spaces[s].summed);
    home_stream->wait(*spaces[s].summed);
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    sums->seal(queues.size(), k, {collectives->sum(kHome, k), outputs[k].count, outputs[k].dtype});
  }
}

void DeviceQueues::State::settle(std::optional<std::chrono::nanoseconds> timeout) {
  try {
    if (sums.has_value()) sums->settle(timeout);
  } catch (const Timeout&) {
    hung.note();
    throw;
  }
}

void DeviceQueues::State::settle_or_hang() noexcept {
  try {
    settle();
  } catch (...) {
  }
}

DeviceQueues::DeviceQueues(const DeviceGroup& group, const DeviceQueueOptions& options)
    : state_(std::make_shared<State>(group, options)) {
  state_->sums->set_owner(state_);
}

DeviceQueues::~DeviceQueues() {
  try {
    drain();
  } catch (...) {  // interrupted: everything returns in the order of the streams
  }
  const std::chrono::nanoseconds patience = state_->hung || state_->left ? kAfterAHang : state_->options.timeout;
  state_->sums->close(patience);
}

std::vector<DeviceId> DeviceQueues::devices() const { return state_->queues.ids(); }
std::size_t DeviceQueues::space_count() const noexcept { return state_->spaces.size(); }
std::size_t DeviceQueues::home_space() const noexcept { return State::kHome; }
std::size_t DeviceQueues::space_of(DeviceId device) const noexcept { return state_->queues[device].space; }
bool DeviceQueues::on_host(std::size_t space) const noexcept { return state_->on_host(space); }
std::string DeviceQueues::transport() const { return state_->transport; }
const GpuLinks& DeviceQueues::links() const noexcept { return state_->links; }

std::unique_ptr<Buffer> DeviceQueues::allocate(std::size_t space, std::size_t bytes, Stream* stream) const {
  if (on_host(space)) return maker(space).allocate_pinned(bytes);
  return state_->collectives != nullptr ? state_->collectives->allocate(space, bytes, *stream)
                                        : maker(space).allocate(bytes, *stream);
}

void DeviceQueues::release_memory() {
  for (std::size_t s = 0; s < state_->gpu_space_count(); ++s) maker(s).release_memory();
}

AsyncDevice& DeviceQueues::maker(std::size_t space) const noexcept { return *state_->spaces[space].maker; }
Stream& DeviceQueues::home_stream() const noexcept {
  state_->settle_or_hang();
  return *state_->home_stream;
}
Stream* DeviceQueues::copy_stream(std::size_t space) const noexcept {
  state_->settle_or_hang();
  return state_->spaces[space].copies.get();
}
Stream* DeviceQueues::stream(DeviceId device) const noexcept { return state_->queues[device].stream; }
Stream* DeviceQueues::source_stream(DeviceId device) const noexcept { return state_->queues[device].source.get(); }

void DeviceQueues::set_stream(NativeStream native) {
  if (native == nullptr ? state_->owns_home_stream : native == state_->home_stream->native()) return;
  state_->use(native);
}

const Event* DeviceQueues::slot(DeviceId device) const {
  return state_->step->end_of_run(device,
                                  static_cast<std::size_t>(std::max<std::int64_t>(state_->options.run_ahead, 0)));
}
const Event* DeviceQueues::idle(DeviceId device) const { return state_->step->end_of_run(device, 0); }
std::chrono::nanoseconds DeviceQueues::patience() const noexcept { return state_->options.timeout; }

void DeviceQueues::give_up(const Event& event) {
  state_->hung.note();
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

void DeviceQueues::expect(std::span<const BufferView> outputs, double scale) { state_->expect(outputs, scale); }

void DeviceQueues::seal(DeviceId device, std::size_t k, const BufferView& bucket, NativeEvent written) {
  state_->seal(device, k, bucket, written);
}

void DeviceQueues::deliver(DeviceId device, const std::vector<BufferView>& parts) {
  State::Queue& queue = state_->queues[device];
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (parts[k].data != nullptr) state_->seal(device, k, parts[k]);
  }
  queue.has_delivered = true;
  if (queue.stream != nullptr) queue.stream->record(*queue.delivered);
}

void DeviceQueues::reduce() {
  State& state = *state_;
  state.settle();
  if (state.collectives != nullptr && !state.outputs.empty()) state.collect();
  for (const State::Space& space : state.spaces) {
    if (space.copies != nullptr && space.takes_part) state.home_stream->wait(*space.arrived);
  }
  for (const auto& [id, queue] : state.queues) {
    if (queue.has_delivered && queue.own_stream != nullptr) state.home_stream->wait(*queue.delivered);
  }
  state.sums->finish();
}

void DeviceQueues::end_step() { state_->step->end(*state_->home_stream); }

void DeviceQueues::drain() {
  State& state = *state_;
  state.left = true;
  try {
    state.sums->cancel();
  } catch (const Timeout&) {
    state.hung.note();
  }
  if (state.collectives != nullptr && state.collectives->lost()) state.hung.note();
  for (auto& [id, queue] : state.queues) state.drain(queue.device, queue.stream);
  for (auto& [id, queue] : state.queues) state.drain(&state.home_device(), queue.source.get());
  for (State::Space& space : state.spaces) state.drain(space.maker, space.copies.get());
  state.drain(&state.home_device(), state.home_stream.get());
  state.left = false;
}

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/device_queues.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

#include "comm/clique.hpp"
#include "engine/gpu_collectives.hpp"

namespace paceline {

StepTimes::~StepTimes() = default;

namespace {

/// A micro-batch on its way: recorded before and after it.
struct Span {
  std::unique_ptr<Event> start;
  std::unique_ptr<Event> end;
  std::chrono::steady_clock::time_point opened;
  double launch_seconds = 0.0;  // of the host
  bool overtaken = false;       // the device was at it before all of it was launched

  /// Whether the device may have waited for launches for a notable part of the time. It cannot have where it came to
  /// the run when all was launched; else for no longer than launching took, and where it then had as much work left,
  /// it was launching that was ahead.
  [[nodiscard]] bool held_up(double seconds) const { return overtaken && seconds < 2.0 * launch_seconds; }
};

struct Times {
  std::vector<std::vector<Span>> spans;  // of each device; events are made once
  std::vector<std::size_t> used;         // how many of them this step has
  std::unique_ptr<Event> over;
  std::vector<char> strict;  // of each device: what launching held up is no evidence; empty: not judged yet
};

/// How many steps ago each device was last measured without waiting for launches. A run that was held up says how long
/// launching takes, and not how fast the device is; but where all are (small models, or a caller who reads every loss),
/// it is the only evidence, and it is the time that such a step costs. So it is set aside only as long as there is
/// better.
struct Evidence {
  static constexpr int kPatience = 8;  // steps that the better one counts for
  std::mutex mutex;
  std::vector<int> steps_without;
};

/// Keeps what steps no longer need for later ones. Steps may outlive the queues.
struct Recycler {
  std::mutex mutex;
  std::vector<std::unique_ptr<Times>> free;
};

class KeptTimes final : public StepTimes {
 public:
  KeptTimes(std::unique_ptr<Times> times, std::shared_ptr<Recycler> recycler, std::chrono::nanoseconds timeout,
            std::weak_ptr<internal::GpuCollectives> collectives, std::shared_ptr<Evidence> evidence)
      : times_(std::move(times)),
        recycler_(std::move(recycler)),
        evidence_(std::move(evidence)),
        timeout_(timeout),
        collectives_(std::move(collectives)) {}
  ~KeptTimes() override {
    try {
      const std::lock_guard lock(recycler_->mutex);
      recycler_->free.push_back(std::move(times_));
    } catch (...) {  // no memory to keep it: it goes
    }
  }

  [[nodiscard]] bool settled() const override { return times_->over->done(); }
  void wait() const override {
    wait_for(*times_->over, timeout_);
    // A collective that was given up lets its stream go on, and that is known by then.
    if (const auto collectives = collectives_.lock()) collectives->check();
  }

  void stamp(std::vector<ClaimRecord>& claims) const override {
    std::vector<std::size_t> next(times_->spans.size(), 0);
    std::vector<double> origin(times_->spans.size(), 0.0);
    std::vector<char> held_up(claims.size(), 0);
    std::vector<char> clean(times_->spans.size(), 0);
    for (std::size_t i = 0; i < claims.size(); ++i) {
      ClaimRecord& claim = claims[i];
      const std::size_t d = claim.micro_batch.device_index;
      const std::vector<Span>& spans = times_->spans[d];
      if (times_->used[d] == 0) continue;
      const std::size_t k = next[d]++;
      if (k == 0) origin[d] = claim.start_seconds;
      claim.start_seconds = origin[d] + spans[k].start->seconds_since(*spans[0].start);
      const double seconds = spans[k].end->seconds_since(*spans[k].start);
      claim.finish_seconds = claim.start_seconds + seconds;
      held_up[i] = static_cast<char>(spans[k].held_up(seconds));
      if (held_up[i] == 0 && !claim.excluded) clean[d] = 1;
    }
    judge(clean);
    for (std::size_t i = 0; i < claims.size(); ++i) {
      if (held_up[i] != 0 && times_->strict[claims[i].micro_batch.device_index] != 0) claims[i].excluded = true;
    }
  }

  [[nodiscard]] Times& times() const noexcept { return *times_; }

 private:
  /// Once for each step, however often it is asked for its times.
  void judge(const std::vector<char>& clean) const {
    const std::lock_guard lock(evidence_->mutex);
    if (!times_->strict.empty()) return;
    evidence_->steps_without.resize(clean.size(), Evidence::kPatience);
    times_->strict.resize(clean.size());
    for (std::size_t d = 0; d < clean.size(); ++d) {
      int& without = evidence_->steps_without[d];
      if (clean[d] != 0) without = 0;
      if (clean[d] == 0 && times_->used[d] > 0) without = std::min(without + 1, Evidence::kPatience + 1);
      times_->strict[d] = static_cast<char>(without <= Evidence::kPatience);
    }
  }

  std::unique_ptr<Times> times_;
  std::shared_ptr<Recycler> recycler_;
  std::shared_ptr<Evidence> evidence_;
  std::chrono::nanoseconds timeout_;
  std::weak_ptr<internal::GpuCollectives> collectives_;
};

struct Lane {
  std::size_t space = 0;
  std::unique_ptr<AsyncDevice> device;  // null on the host
  Stream* stream = nullptr;             // home's where one device is all there is
  std::unique_ptr<Stream> own_stream;
  std::unique_ptr<Stream> source;
  std::unique_ptr<Event> delivered;
  std::vector<BufferView> parts;
  bool entered = false;
  bool has_delivered = false;
};

struct Space {
  // The GPU as a whole, also where its devices are parts: what is done for all of them shall not have to do with one's
  // share of it. Null on the host.
  std::shared_ptr<AsyncDevice> device;
  std::shared_ptr<Stream> copies;  // null at home, unless it takes part in collectives
  std::unique_ptr<Event> arrived;  // the parameters
  std::unique_ptr<Event> summed;
  std::vector<std::unique_ptr<Buffer>> sums;    // of its lanes' parts; none on the host
  std::vector<std::unique_ptr<Buffer>> landed;  // at home, one for each part that comes
};

std::size_t bytes_of(const BufferView& part) { return part.count * size_of(part.dtype); }

/// The k-th buffer of a list, at least so large. What was there goes back in the order of the stream it was made for.
void* reserve(std::vector<std::unique_ptr<Buffer>>& buffers, std::size_t k, std::size_t bytes, AsyncDevice& device,
              Stream& stream) {
  if (buffers.size() <= k) buffers.resize(k + 1);
  if (buffers[k] == nullptr || buffers[k]->bytes() < bytes) {
    buffers[k].reset();
    buffers[k] = device.allocate(bytes, stream);
  }
  return buffers[k]->data();
}

}  // namespace

struct DeviceQueues::State {
  DeviceQueueOptions options;
  std::size_t run_ahead = 1;
  bool one_whole_gpu = false;  // is all there is: then it computes on the home stream
  std::size_t home = 0;
  std::vector<Lane> lanes;
  std::vector<Space> spaces;
  std::vector<Device> gpus;  // of each space; nothing is read of the host's
  std::string transport;
  std::shared_ptr<internal::GpuCollectives> collectives;  // null: by copies
  std::unique_ptr<Stream> home_stream;
  bool owns_home_stream = false;
  std::unique_ptr<Event> ready;
  std::shared_ptr<Recycler> recycler = std::make_shared<Recycler>();
  std::shared_ptr<Evidence> evidence = std::make_shared<Evidence>();
  std::shared_ptr<const KeptTimes> step;
  std::atomic<bool> hung{false};
  std::stop_source stop;  // of this step
  bool left = false;      // a drain that did not come to its end

  [[nodiscard]] AsyncDevice& home_device() const { return *spaces[home].device; }
  [[nodiscard]] AsyncDevice& maker(const Space& space) const { return space.device ? *space.device : home_device(); }
  [[nodiscard]] bool on_host(const Space& space) const { return space.device == nullptr; }
  [[nodiscard]] const Event& arrival(const Lane& lane) const {
    return lane.space == home ? *ready : *spaces[lane.space].arrived;
  }

  void find_spaces(const DeviceGroup& group) {
    std::map<std::string, std::size_t> known;
    lanes.resize(group.size());
    home = group.size();
    for (std::size_t d = 0; d < group.size(); ++d) {
      const Device& device = group.devices()[d];
      const auto [entry, is_new] = known.emplace(device.memory_space, spaces.size());
      const Backend& backend = backend_of(device);
      lanes[d].space = entry->second;
      lanes[d].device = backend.open(device);
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
    const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
    if (group.size() > 1 && blocking != nullptr && *blocking != '\0' && std::string_view(blocking) != "0") {
      throw Unavailable(
          "DataParallel: CUDA_LAUNCH_BLOCKING is set, so every launch waits for its kernel: several devices would take "
          "turns, and collectives hang. Unset it, or use one device.");
    }
    if (home == group.size()) {
      throw InvalidArgument("DeviceQueues: every device of the group works during the call; there is nothing to queue");
    }
  }

  void use(void* native) {
    AsyncDevice& device = home_device();
    std::unique_ptr<Stream> before =
        std::exchange(home_stream, native != nullptr ? device.adopt_stream(native) : device.make_stream());
    owns_home_stream = native == nullptr;
    if (before != nullptr) {  // what was ordered on the old one stays before what comes
      const std::unique_ptr<Event> moved = device.make_event(false);
      before->record(*moved);
      home_stream->wait(*moved);
    }
    if (one_whole_gpu) lanes.front().stream = home_stream.get();
  }

  void open(Lane& lane) {
    if (lane.space != home) lane.source = home_device().make_stream();
    if (lane.device == nullptr) return;
    lane.delivered = lane.device->make_event(false);
    if (lane.stream != nullptr) return;
    lane.own_stream = lane.device->make_stream();
    lane.stream = lane.own_stream.get();
  }

  /// Where the group has several GPUs, after their spaces' streams were made.
  void connect() {
    std::vector<std::size_t> members;
    for (std::size_t s = 0; s < spaces.size(); ++s) {
      if (!on_host(spaces[s])) members.push_back(s);
    }
    if (members.size() < 2) return;
    std::string why_none = "as asked for";
    if (options.collectives.transport != Transport::copies) {
      open(spaces[home]);
      std::vector<internal::Rank> ranks;
      for (const std::size_t s : members) ranks.push_back({gpus[s], spaces[s].device, spaces[s].copies});
      auto clique = internal::make_native_clique(ranks, options.collectives, why_none);
      if (clique != nullptr) {
        collectives = std::make_shared<internal::GpuCollectives>(
            std::move(clique), std::move(ranks), std::move(members), home, options.staging_bytes, options.timeout);
        transport = collectives->description();
        return;
      }
      if (options.collectives.transport == Transport::nccl) throw Unavailable("DataParallel: " + why_none);
      spaces[home].copies.reset();
    }
    transport = fmt::format("copies through {} ({})", gpus[home].name, why_none);
  }

  void open(Space& space) {
    AsyncDevice& device = maker(space);
    space.copies = device.make_stream();
    space.arrived = device.make_event(false);
    space.summed = device.make_event(false);
  }

  /// Waits, and remembers a hang: whatever comes after it would wait as long again.
  void await(const Event& event, const std::stop_token& until = {}) {
    try {
      wait_for(event, options.timeout, until);
    } catch (const Timeout&) {
      hung = true;
      throw;
    }
  }

  /// The space's stream comes after what its devices have delivered.
  std::vector<const Lane*> gather(Space& space, std::size_t index) {
    std::vector<const Lane*> here;
    for (const Lane& lane : lanes) {
      if (!lane.has_delivered || lane.space != index) continue;
      here.push_back(&lane);
      if (lane.stream != nullptr) space.copies->wait(*lane.delivered);
    }
    home_stream->wait(*space.arrived);
    return here;
  }

  /// The sums of all GPUs' devices, at home.
  void collect(std::span<const BufferView> outputs, std::vector<std::vector<const void*>>& inputs) {
    collectives->check();  // of the parameters, say: then there is nothing to sum
    std::vector<std::size_t> sizes;
    for (const BufferView& output : outputs) sizes.push_back(bytes_of(output));
    collectives->reserve(sizes);
    const std::span<const std::size_t> members = collectives->spaces();
    for (std::size_t r = 0; r < members.size(); ++r) {
      Space& space = spaces[members[r]];
      const std::vector<const Lane*> here = gather(space, members[r]);
      for (std::size_t k = 0; k < outputs.size(); ++k) {
        void* const sum = collectives->sum(r, k);
        std::vector<const void*> addends;
        for (const Lane* lane : here) addends.push_back(lane->parts[k].data);
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
    for (std::size_t r = 0; r < members.size(); ++r) {
      Space& space = spaces[members[r]];
      space.copies->record(*space.summed);
      home_stream->wait(*space.summed);
      if (members[r] != home) continue;
      for (std::size_t k = 0; k < outputs.size(); ++k) inputs[k].push_back(collectives->sum(r, k));
    }
  }

  void bring_home(Space& space, std::size_t index, std::vector<std::vector<const void*>>& inputs) {
    const std::vector<const Lane*> here = gather(space, index);
    if (here.empty()) return;
    if (inputs.empty()) {  // nothing to sum, but what they have done is for the caller
      space.copies->record(*space.summed);
      home_stream->wait(*space.summed);
      return;
    }
    const std::size_t part_count = inputs.size();
    std::vector<std::vector<BufferView>> coming(part_count);
    for (std::size_t k = 0; k < part_count; ++k) {
      for (const Lane* lane : here) coming[k].push_back(lane->parts[k]);
    }
    if (!on_host(space)) {
      for (std::size_t k = 0; k < part_count; ++k) {
        BufferView sum = coming[k].front();
        sum.data = reserve(space.sums, k, bytes_of(sum), maker(space), *space.copies);
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

  /// Home's parameters to everybody else, once they are ready.
  void distribute(std::span<const SpaceCopy> copies) {
    home_stream->record(*ready);
    for (Space& space : spaces) {
      if (space.copies != nullptr) space.copies->wait(*ready);
    }
    if (collectives != nullptr) collectives->broadcast(copies);
    for (const SpaceCopy& copy : copies) {
      Space& space = spaces[copy.space];
      if (collectives == nullptr || on_host(space)) space.copies->copy(copy.to, copy.from, copy.bytes);
    }
    for (Space& space : spaces) {
      if (space.copies != nullptr) space.copies->record(*space.arrived);
    }
  }

  /// Waits until the stream has nothing left. A device that fails here has nothing left either.
  void drain(AsyncDevice* device, Stream* stream) {
    if (device == nullptr || stream == nullptr || hung) return;
    try {
      const std::unique_ptr<Event> event = device->make_event(false);
      stream->record(*event);
      await(*event);
    } catch (const Error&) {
    }
  }
};

DeviceQueues::DeviceQueues(const DeviceGroup& group, const DeviceQueueOptions& options)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.options = options;
  state.run_ahead = static_cast<std::size_t>(std::max<std::int64_t>(options.run_ahead, 0));
  state.find_spaces(group);
  state.use(options.stream);
  state.ready = state.home_device().make_event(false);
  for (Lane& lane : state.lanes) state.open(lane);
  for (std::size_t s = 0; s < state.spaces.size(); ++s) {
    if (s != state.home) state.open(state.spaces[s]);
  }
  state.connect();
}

DeviceQueues::~DeviceQueues() {
  try {
    drain();
  } catch (...) {  // somebody does not want to wait: everything goes back in the order of the streams
  }
}

std::size_t DeviceQueues::device_count() const noexcept { return state_->lanes.size(); }
std::size_t DeviceQueues::space_count() const noexcept { return state_->spaces.size(); }
std::size_t DeviceQueues::home_space() const noexcept { return state_->home; }
std::size_t DeviceQueues::space_of(std::size_t device) const noexcept { return state_->lanes[device].space; }
bool DeviceQueues::on_host(std::size_t space) const noexcept { return state_->on_host(state_->spaces[space]); }
std::string DeviceQueues::transport() const { return state_->transport; }

std::unique_ptr<Buffer> DeviceQueues::allocate(std::size_t space, std::size_t bytes, Stream* stream) const {
  State& state = *state_;
  AsyncDevice& device = maker(space);
  if (on_host(space)) return device.allocate_pinned(bytes);
  return state.collectives != nullptr ? state.collectives->allocate(space, bytes, *stream)
                                      : device.allocate(bytes, *stream);
}

AsyncDevice& DeviceQueues::maker(std::size_t space) const noexcept { return state_->maker(state_->spaces[space]); }
Stream& DeviceQueues::home_stream() const noexcept { return *state_->home_stream; }
Stream* DeviceQueues::copy_stream(std::size_t space) const noexcept { return state_->spaces[space].copies.get(); }
Stream* DeviceQueues::stream(std::size_t device) const noexcept { return state_->lanes[device].stream; }
Stream* DeviceQueues::source_stream(std::size_t device) const noexcept { return state_->lanes[device].source.get(); }

void DeviceQueues::set_stream(void* native) {
  if (native == nullptr ? state_->owns_home_stream : native == state_->home_stream->native()) return;
  // What landed at home for the old stream's reductions goes back in its order.
  for (Space& space : state_->spaces) space.landed.clear();
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
  std::unique_ptr<Times> times;
  {
    const std::lock_guard lock(state.recycler->mutex);
    if (!state.recycler->free.empty()) {
      times = std::move(state.recycler->free.back());
      state.recycler->free.pop_back();
    }
  }
  if (times == nullptr) {
    times = std::make_unique<Times>();
    times->spans.resize(state.lanes.size());
    times->over = state.home_device().make_event(false);
  }
  times->used.assign(state.lanes.size(), 0);
  times->strict.clear();
  state.stop = std::stop_source();
  state.step = std::make_shared<KeptTimes>(std::move(times), state.recycler, state.options.timeout, state.collectives,
                                           state.evidence);
  for (Lane& lane : state.lanes) {
    lane.entered = false;
    lane.has_delivered = false;
    lane.parts.clear();
  }
  try {
    state.distribute(copies);
  } catch (...) {
    drain();  // nobody else would: the step has not begun
    throw;
  }
  return state.step;
}

bool DeviceQueues::enter(std::size_t device) {
  State& state = *state_;
  Lane& lane = state.lanes[device];
  if (std::exchange(lane.entered, true)) return false;
  if (lane.source != nullptr) lane.source->wait(*state.ready);
  if (lane.stream == nullptr) {
    state.await(state.arrival(lane));
  } else if (lane.own_stream != nullptr) {
    lane.stream->wait(state.arrival(lane));
  }
  return true;
}

void DeviceQueues::pace(std::size_t device) {
  State& state = *state_;
  const std::vector<Span>& spans = state.step->times().spans[device];
  const std::size_t used = state.step->times().used[device];
  if (used > state.run_ahead) state.await(*spans[used - 1 - state.run_ahead].end, state.stop.get_token());
}

void DeviceQueues::catch_up(std::size_t device) {
  State& state = *state_;
  const std::size_t used = state.step->times().used[device];
  if (used > 0) state.await(*state.step->times().spans[device][used - 1].end, state.stop.get_token());
}

bool DeviceQueues::begin_run(std::size_t device) {
  State& state = *state_;
  Lane& lane = state.lanes[device];
  if (lane.stream == nullptr) return false;
  std::vector<Span>& spans = state.step->times().spans[device];
  std::size_t& used = state.step->times().used[device];
  // A device that has nothing to do when it is given more has waited for the host: that time is not its own.
  const bool dry = used > 0 && spans[used - 1].end->done();
  if (used == spans.size()) spans.push_back({lane.device->make_event(true), lane.device->make_event(true), {}});
  ++used;
  restart_run(device);
  return dry;
}

void DeviceQueues::restart_run(std::size_t device) {
  Lane& lane = state_->lanes[device];
  if (lane.stream == nullptr) return;
  Times& times = state_->step->times();
  Span& span = times.spans[device][times.used[device] - 1];
  lane.stream->record(*span.start);
  span.opened = std::chrono::steady_clock::now();
}

void DeviceQueues::end_run(std::size_t device) {
  Lane& lane = state_->lanes[device];
  if (lane.stream == nullptr) return;
  Times& times = state_->step->times();
  Span& span = times.spans[device][times.used[device] - 1];
  lane.stream->record(*span.end);
  span.launch_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - span.opened).count();
  span.overtaken = span.start->done();
}

void DeviceQueues::deliver(std::size_t device, std::vector<BufferView> parts) {
  Lane& lane = state_->lanes[device];
  lane.parts = std::move(parts);
  lane.has_delivered = true;
  if (lane.stream != nullptr) lane.stream->record(*lane.delivered);
}

void DeviceQueues::reduce(std::span<const BufferView> outputs, double scale) {
  State& state = *state_;
  std::vector<std::vector<const void*>> inputs(outputs.size());
  const bool collects = state.collectives != nullptr && !outputs.empty();
  if (collects) state.collect(outputs, inputs);
  for (std::size_t s = 0; s < state.spaces.size(); ++s) {
    if (collects ? state.on_host(state.spaces[s]) : state.spaces[s].copies != nullptr) {
      state.bring_home(state.spaces[s], s, inputs);
    }
  }
  for (Lane& lane : state.lanes) {
    if (collects || !lane.has_delivered || lane.space != state.home) continue;
    if (lane.own_stream != nullptr) state.home_stream->wait(*lane.delivered);
    for (std::size_t k = 0; k < outputs.size(); ++k) inputs[k].push_back(lane.parts[k].data);
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (inputs[k].empty()) continue;
    const BufferView& output = outputs[k];
    state.home_stream->reduce({inputs[k], output.data, output.count, output.dtype, scale});
  }
}

void DeviceQueues::end_step() { state_->home_stream->record(*state_->step->times().over); }

void DeviceQueues::stop() noexcept { state_->stop.request_stop(); }

void DeviceQueues::drain() {
  State& state = *state_;
  state.left = true;
  // NCCL's memory does not go back in the order of a stream: not before this has come to its end.
  if (state.collectives != nullptr) {
    if (state.collectives->lost()) state.hung = true;
    state.collectives->keep_memory(true);
  }
  for (Lane& lane : state.lanes) state.drain(lane.device.get(), lane.stream);
  for (Lane& lane : state.lanes) state.drain(&state.home_device(), lane.source.get());
  for (Space& space : state.spaces) state.drain(&state.maker(space), space.copies.get());
  state.drain(&state.home_device(), state.home_stream.get());
  if (state.collectives != nullptr) state.collectives->keep_memory(state.hung);
  state.left = false;
}

}  // namespace paceline

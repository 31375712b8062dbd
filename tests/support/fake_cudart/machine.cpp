// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "driver.hpp"

namespace fake {
namespace {

constexpr double kDefaultSeconds = 1e-6;
constexpr std::size_t kQueueLimit = 1024;

}  // namespace

void misuse(const std::string& what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what.c_str());
  std::abort();
}

Machine& machine() {
  static Machine* const the_one = new Machine;  // leaked, so that it outlives static objects that free memory
  return *the_one;
}

void Clock::join(const Clock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (std::size_t s = 0; s < other.counts_.size(); ++s) counts_[s] = std::max(counts_[s], other.counts_[s]);
}

void Clock::set(std::size_t stream, std::uint64_t count) {
  if (counts_.size() <= stream) counts_.resize(stream + 1);
  counts_[stream] = count;
}

bool Clock::covers(std::size_t stream, std::uint64_t count) const {
  return stream < counts_.size() && counts_[stream] >= count;
}

void Machine::boot(const Settings& settings) {
  settings_ = settings;
  random_.seed(settings.seed);
  // Kept, so that a handle from an earlier machine (of a thread that was left behind, say) never equals that of a new
  // stream.
  static auto* const gone = new std::vector<std::unique_ptr<Stream>>;
  for (auto& [key, stream] : streams_) {
    stream->queue.clear();
    gone->push_back(std::move(stream));
  }
  // Kept, because an earlier machine's pools may still be in use.
  static auto* const gone_pools = new std::vector<std::unique_ptr<Pool>>;
  for (auto& [key, pool] : pools) gone_pools->push_back(std::move(pool));
  streams_.clear();
  legacy_.clear();
  events_.clear();
  green_contexts_.clear();
  allocations_.clear();
  pools.clear();
  used_.clear();
  problems.clear();
  sticky.clear();
  peer_access.clear();
  driver_staged_copies = 0;
  peer_copy_seconds = 0.0;
  links.clear();
  pushes.clear();
  lies.clear();
  refused_by_pools.clear();
  memory_of.clear();
  bytes_between_gpus = 0;
  host_copies = {};
  synchronize_calls = 0;
  made_events = 0;
  pointer_queries = 0;
  node_of_pinned_memory = -1;
  queries = 0;
  allocations_until_failure = events_until_failure = -1;
  before_copy = nullptr;
  next_stream_ = 1;
  host_ = {};
}

cudaError_t Machine::health(int device) const {
  const auto found = sticky.find(device);
  return found == sticky.end() ? cudaSuccess : found->second;
}

bool Machine::can_access(int device, int peer) const {
  return device != peer && device / settings_.switch_size == peer / settings_.switch_size;
}

/// All the device's work counts as finished, for whoever learns of the error.
void Machine::break_down(int device, cudaError_t error) {
  sticky[device] = error;
  for (const auto& [key, stream] : streams_) {
    if (stream->device == device) host_.join(stream->clock);
  }
}

Stream* Machine::make_stream(int device, const GreenContext* green) {
  auto stream = std::make_unique<Stream>();
  stream->id = next_stream_++;
  stream->device = device;
  stream->green = green;
  stream->priority = random_();
  Stream* raw = stream.get();
  streams_[raw] = std::move(stream);
  return raw;
}

bool Machine::known(const Stream* stream) const {
  const auto found = streams_.find(stream);
  return found != streams_.end() && !found->second->dropped;
}

Stream* Machine::resolve(cudaStream_t handle) {
  if (handle != cudaStreamLegacy) return reinterpret_cast<Stream*>(handle);
  Stream*& legacy = legacy_[current_device()];
  if (legacy == nullptr) legacy = make_stream(current_device());
  return legacy;
}

bool Machine::destroy(Stream* stream) {
  if (!known(stream)) return false;
  // In CUDA the call returns at once and the work goes on. Here the work is finished first, so that a test need not
  // wait for it. With a green context it stays open, because the context must not be destroyed before the work is done.
  if (stream->green != nullptr && !stream->queue.empty()) {
    stream->dropped = true;
    return true;
  }
  run_until([&] { return stream->queue.empty(); });
  streams_.erase(stream);
  return true;
}

GreenContext* Machine::make_green_context(int device, std::vector<int> sms) {
  if (out_of_memory_is_due()) return nullptr;
  for (const auto& [key, other] : green_contexts_) {
    const auto shared = [&](int sm) { return std::find(other->sms.begin(), other->sms.end(), sm) != other->sms.end(); };
    if (other->device == device && std::any_of(sms.begin(), sms.end(), shared)) {
      misuse("two green contexts of one GPU share SMs");
    }
  }
  auto made = std::make_unique<GreenContext>(GreenContext{device, std::move(sms)});
  GreenContext* raw = made.get();
  green_contexts_[raw] = std::move(made);
  return raw;
}

bool Machine::known(const GreenContext* green) const { return green_contexts_.contains(green); }

void Machine::destroy(GreenContext* green) {
  for (const auto& [key, stream] : streams_) {
    if (stream->green != green) continue;
    misuse(stream->dropped ? "a green context was destroyed while work of its streams was running"
                           : "a green context was destroyed before its streams");
  }
  green_contexts_.erase(green);
}

Event* Machine::make_event(int device, bool timed) {
  auto event = std::make_unique<Event>();
  event->device = device;
  event->timed = timed;
  Event* raw = event.get();
  events_[raw] = std::move(event);
  ++made_events;
  return raw;
}

bool Machine::destroy(Event* event) { return events_.erase(event) == 1; }

void Machine::enqueue(Stream* stream, Operation operation) {
  // A launch into a full queue waits until one of its launches has run.
  if (stream->queue.size() >= kQueueLimit && current == nullptr) {
    if (!run_until([&] { return stream->queue.size() < kQueueLimit; })) {
      complain("the queue of a stream is full, and its work waits for the thread that launches: a deadlock");
    }
  }
  operation.known = host_;
  stream->queue.push_back(std::move(operation));
  if (settings_.eager) {
    while (current == nullptr && run_one()) {
    }
  } else {
    run_a_few();
  }
}

void Machine::record(Stream* stream, Event* event) {
  event->latest = std::make_shared<Recording>();
  Operation operation;
  operation.recorded = event->latest;
  operation.name = "record";
  enqueue(stream, std::move(operation));
}

void Machine::wait(Stream* stream, const Event* event) {
  if (event->latest == nullptr) misuse("a stream waits for an event that was never recorded, which would not wait");
  Operation operation;
  operation.awaited = event->latest;
  operation.name = "wait";
  enqueue(stream, std::move(operation));
}

bool Machine::query(const Recording& recording) {
  run_a_few();
  if (!recording.done) run_one();  // so that a program that polls makes progress
  ++queries;
  const bool seen = recording.done && queries >= recording.visible;
  if (seen) host_.join(recording.clock);
  return seen;
}

bool Machine::query(Stream* stream) {
  run_a_few();
  if (!stream->queue.empty()) run_one();
  if (stream->queue.empty()) host_.join(stream->clock);
  return stream->queue.empty();
}

bool Machine::run_until(const std::function<bool()>& done) {
  while (!done()) {
    if (!run_one()) return false;
  }
  return true;
}

bool Machine::finish_all(int device) {
  return run_until([&] {
    return std::all_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
      return entry.second->device != device || entry.second->queue.empty();
    });
  });
}

void Machine::run_a_few() {
  if (current != nullptr) return;
  for (std::uint64_t left = random_() % 4; left > 1; --left) run_one();
}

/// Even seeds choose any stream that can go on. Odd seeds choose by priorities that change now and then, which finds
/// orders in which one stream is far behind (Burckhardt et al., 2010).
bool Machine::run_one() {
  std::vector<Stream*> ready;
  for (const auto& [key, stream] : streams_) {
    if (stream->hung || stream->queue.empty()) continue;
    const auto& awaited = stream->queue.front().awaited;
    if (awaited == nullptr || awaited->done) ready.push_back(stream.get());
  }
  if (ready.empty()) return false;
  // By number, because the map's order by address does not depend on the seed.
  std::sort(ready.begin(), ready.end(), [](const Stream* a, const Stream* b) { return a->id < b->id; });
  Stream* next = ready[random_() % ready.size()];
  if (settings_.seed % 2 == 1) {
    if (random_() % 32 == 0) next->priority = random_();
    next = *std::max_element(ready.begin(), ready.end(),
                             [](const Stream* a, const Stream* b) { return a->priority < b->priority; });
  }
  run(*next);
  return true;
}

void Machine::run(Stream& stream) {
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.clock.join(operation.known);
  stream.clock.set(stream.id, ++stream.count);
  if (operation.awaited != nullptr) {
    stream.clock.join(operation.awaited->clock);
    stream.seconds = std::max(stream.seconds, operation.awaited->seconds);
  }
  if (operation.body) {
    current = &operation;
    current_stream = &stream;
    current_cost = kDefaultSeconds;
    operation.body();
    stream.seconds += current_cost;
    current = nullptr;
    current_stream = nullptr;
  }
  if (operation.recorded != nullptr) {
    if (settings_.eager) {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      stream.seconds = std::chrono::duration<double>(now).count();
    }
    operation.recorded->clock = stream.clock;
    operation.recorded->seconds = stream.seconds;
    operation.recorded->visible = queries + settings_.lag;
    operation.recorded->done = true;
  }
  if (stream.dropped && stream.queue.empty()) streams_.erase(&stream);
}

void Machine::complain(std::string problem) {
  if (problems.size() < 20) problems.push_back(std::move(problem));
}

Leftovers Machine::leftovers() const {
  Leftovers left;
  for (const auto& [address, allocation] : allocations_) {
    if (!allocation->freed) ++(allocation->device < 0 ? left.host_allocations : left.device_allocations);
  }
  left.pools = pools.size();
  for (const auto& [key, stream] : streams_) left.streams += stream->dropped ? 0U : 1U;
  left.streams -= legacy_.size();
  left.events = events_.size();
  left.green_contexts = green_contexts_.size();
  for (const auto& [key, stream] : streams_) left.queued += stream->queue.size();
  return left;
}

bool Machine::works() const {
  const auto works = [](const Operation& operation) { return operation.name != kRelease; };
  return std::any_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
    return std::any_of(entry.second->queue.begin(), entry.second->queue.end(), works);
  });
}

}  // namespace fake

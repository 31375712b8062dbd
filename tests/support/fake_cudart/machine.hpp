// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda.hpp"

namespace fake {

/// Progress of every stream: what happened before an operation. Entry s counts operations of stream s.
class Clock {
 public:
  void join(const Clock& other);
  void set(std::size_t stream, std::uint64_t count);
  [[nodiscard]] bool covers(std::size_t stream, std::uint64_t count) const;

 private:
  std::vector<std::uint64_t> counts_;
};

/// One recording of an event. A wait refers to the recording, because the event may be recorded again.
struct Recording {
  bool done = false;
  std::uint64_t visible = 0;  ///< the number of queries after which the host may see it
  Clock clock;
  double seconds = 0.0;
};

struct Operation {
  std::function<void()> body;
  Clock known;                          ///< what the host had seen finish when it enqueued this
  std::shared_ptr<Recording> awaited;   ///< null: waits for nothing
  std::shared_ptr<Recording> recorded;  ///< done when this has run
  const char* name = "";
};

// Arrays: one address each, by which they are known.
inline constexpr char kRelease[] = "a release";
inline constexpr char kCopy[] = "a copy";

struct GreenContext {
  int device = 0;
  std::vector<int> sms;
};

struct Stream {
  std::size_t id = 0;
  int device = 0;
  const GreenContext* green = nullptr;  ///< null: uses all SMs
  bool dropped = false;                 ///< destroyed with work left
  bool hung = false;
  std::uint64_t priority = 0;  ///< for the scheduler
  std::deque<Operation> queue;
  std::uint64_t count = 0;
  Clock clock;
  double seconds = 0.0;
};

struct Event {
  int device = 0;
  bool timed = true;
  std::shared_ptr<Recording> latest;
};

struct Access {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t stream = 0;
  std::uint64_t count = 0;
  bool write = false;
  const char* name = "";
};

struct Pool {
  int device = 0;
  std::size_t used = 0;
  std::size_t used_high = 0;
  std::set<int> peers;  ///< other devices with access

  std::size_t reserved = 0;  // it keeps what is freed until it is trimmed
};

struct Allocation {
  std::vector<std::byte> storage;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  int device = 0;  ///< -1 for pinned host memory
  Pool* pool = nullptr;
  bool mapped = false;      ///< by the program itself, which gave no peer access (map_own)
  bool given_back = false;  ///< its release is enqueued
  bool freed = false;
  std::vector<Access> accesses;
};

/// The whole state of the fake. Every entry point locks `mutex` first; the functions here do not lock.
class Machine {
 public:
  void boot(const Settings& settings);

  [[nodiscard]] const Settings& settings() const { return settings_; }
  /// cudaSuccess, or the sticky error of the device.
  [[nodiscard]] cudaError_t health(int device) const;
  /// Whether this record of an event, or wait for one, fails (fail_event).
  bool event_failure_is_due() { return events_until_failure >= 0 && --events_until_failure < 0; }
  void break_down(int device, cudaError_t error);
  /// Whether the hardware lets one device access the other's memory.
  [[nodiscard]] bool can_access(int device, int peer) const;

  Stream* make_stream(int device, const GreenContext* green = nullptr);
  bool destroy(Stream* stream);
  /// The stream of a handle: cudaStreamLegacy is each device's own stream. Null stays null.
  [[nodiscard]] Stream* resolve(cudaStream_t handle);
  [[nodiscard]] bool known(const Stream* stream) const;
  Event* make_event(int device, bool timed);
  bool destroy(Event* event);

  /// Null if there is no memory left.
  GreenContext* make_green_context(int device, std::vector<int> sms);
  [[nodiscard]] bool known(const GreenContext* green) const;
  void destroy(GreenContext* green);

  void enqueue(Stream* stream, Operation operation);
  void record(Stream* stream, Event* event);
  void wait(Stream* stream, const Event* event);
  /// Whether it is done, after letting some work run. From then on the host knows.
  bool query(const Recording& recording);
  bool query(Stream* stream);
  /// Runs work until `done` returns true. False if nothing more can run.
  bool run_until(const std::function<bool()>& done);
  /// Runs all work of the device, and of others what it waits for. False if some cannot run.
  bool finish_all(int device);
  /// Lets some work run, as much as the seed wants.
  void run_a_few();

  [[nodiscard]] std::size_t memory_bytes(int device) const {
    const auto found = memory_of.find(device);
    return found == memory_of.end() ? settings_.memory_bytes : found->second;
  }
  /// Null if there is no memory left.
  Allocation* allocate(int device, std::size_t bytes);
  [[nodiscard]] Allocation* find(const void* data);
  void free(Allocation* allocation);
  /// Whether kernels of the device may access the memory.
  [[nodiscard]] bool reaches(int device, const Allocation& allocation) const;
  void access(const void* data, std::size_t bytes, bool write);
  /// Moves the bytes of a copy, or what arrives of them.
  void move(void* to, const void* from, std::size_t bytes);
  /// Adds a sentence to problems().
  void complain(std::string problem);

  Leftovers leftovers() const;
  /// Whether anything is enqueued except releases of memory.
  bool works() const;

  std::mutex mutex;
  std::vector<std::string> problems;
  std::map<int, cudaError_t> sticky;
  std::map<const Pool*, std::unique_ptr<Pool>> pools;
  std::set<std::pair<int, int>> peer_access;  ///< enabled: who accesses whom
  int driver_staged_copies = 0;
  int synchronize_calls = 0;
  int made_events = 0;
  int pointer_queries = 0;
  int node_of_pinned_memory = -1;
  std::uint64_t queries = 0;
  int allocations_until_failure = -1;
  int events_until_failure = -1;  ///< records and waits
  std::function<cudaError_t()> before_copy;
  Operation* current = nullptr;
  Stream* current_stream = nullptr;
  double current_cost = 0.0;
  double peer_copy_seconds = 0.0;
  std::map<std::pair<int, int>, double> links;   ///< bytes per second, by source and target
  std::map<std::pair<int, int>, double> pushes;  ///< where that differs if the source copies
  std::set<std::pair<int, int>> lies;            ///< source and target of direct copies that deliver zeros
  std::set<int> refused_by_pools;
  std::map<int, std::size_t> memory_of;  ///< of devices that differ from the settings
  std::size_t bytes_between_gpus = 0;
  HostCopies host_copies;

 private:
  bool out_of_memory_is_due();
  bool run_one();
  void run(Stream& stream);

  Settings settings_;
  std::mt19937_64 random_;
  std::map<const Stream*, std::unique_ptr<Stream>> streams_;
  std::map<int, Stream*> legacy_;  ///< by device; created at first use
  std::map<const Event*, std::unique_ptr<Event>> events_;
  std::map<const GreenContext*, std::unique_ptr<GreenContext>> green_contexts_;
  std::map<const std::byte*, std::unique_ptr<Allocation>> allocations_;
  std::map<int, std::size_t> used_;
  std::size_t next_stream_ = 1;
  Clock host_;  ///< what any host thread has seen finish
};

Machine& machine();

/// Ends the program: a misuse that CUDA would silently accept.
[[noreturn]] void misuse(const std::string& what);

}  // namespace fake

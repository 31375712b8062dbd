// SPDX-License-Identifier: Apache-2.0
//
// An executing fake of the CUDA runtime with the same entry points. Streams are queues in this process, kernels run as
// functions on the host, and a seeded scheduler decides when they run. Linked in place of the static runtime, it runs
// the library's own object files on a machine without a GPU. It finds errors that a GPU would show only now and then:
//
//   - Work runs in any order that CUDA allows, as late as the seed wants.
//   - Each access of a kernel or copy is compared with all earlier accesses of the same bytes. If one of two accesses
//     writes, they must be ordered by streams, events or a host that saw the first one finish (vector clocks, as in
//     data race detection). So a missing wait is found in every order that the seed may choose.
//   - Access to another GPU's memory is off until it is enabled. Without it a kernel breaks its device down, and a copy
//     is staged by the driver (driver_staged_copies).
//   - The first launch of a kernel on a device loads it, unless it is loaded: that waits until the device is idle.
//     A launch into a full queue waits, too. If what they wait for cannot run, that is a problem: a deadlock.
//   - Memory is poisoned when it is allocated and when it is freed.
//   - A call that would create GPU 0's context, because its thread has none, is reported (use_context).
//   - Waiting for an event that was never recorded ends the program. CUDA would not wait at all.
//
// It has only what the library calls; a new entry point fails at link time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fake {

struct Settings {
  std::uint64_t seed = 0;
  int device_count = 1;
  std::size_t memory_bytes = std::size_t{1} << 30;  ///< per device
  std::string model{};                              ///< of all devices; empty: "Fake GPU" and the device's number
  int multiprocessors = 132;
  int sm_granularity = 8;  ///< green contexts have a multiple of this number of SMs
  int switch_size = 2;     ///< the number of neighbours that can access each other's memory; 1: no GPU can
  bool nvlink = false;     ///< whether such neighbours are connected by NVLink
  bool pools = true;       ///< whether the devices have memory pools
  int driver_version = 13000;
  bool driver_present = true;
  bool push_fails = false;      ///< also making a lost device current returns its error
  bool eager = false;           ///< run everything as soon as possible, and time it by the host's clock
  std::uint64_t lag = 0;        ///< an event looks unfinished for so many queries
  bool foreign_memory = false;  ///< accept memory that no device has allocated as foreign, without checks
};

/// Starts a new machine, without a current context on the calling thread. Forgets everything of the previous machine.
void boot(const Settings& settings);
/// Sets a function that frees what the program caches. It runs before leftovers are counted and before a boot.
void set_release(void (*release)());

/// What the program has not freed, and the work that it enqueued and that has not run.
struct Leftovers {
  std::size_t device_allocations = 0;
  std::size_t host_allocations = 0;
  std::size_t pools = 0;
  std::size_t streams = 0;  ///< including streams of green contexts
  std::size_t events = 0;
  std::size_t green_contexts = 0;
  std::size_t queued = 0;
  friend bool operator==(const Leftovers&, const Leftovers&) = default;
};
[[nodiscard]] Leftovers leftovers();

/// Sentences about accesses without an order, outside an allocation, or of freed memory, and about calls on threads
/// without a context. Empty if there were none.
[[nodiscard]] std::vector<std::string> problems();

/// The number of calls that blocked a host thread until the GPU was done: cudaFreeHost during work. There is no
/// cuda*Synchronize to link to.
[[nodiscard]] int synchronize_calls();

/// The number of copies between GPUs that have no access to each other. On a GPU they work, but slowly: the driver
/// stages them through the host, and need not overlap them with other work.
[[nodiscard]] int driver_staged_copies();

/// Bytes that pools keep though nothing uses them.
[[nodiscard]] std::size_t unused_pool_bytes();

/// The number of events that were made since the boot.
[[nodiscard]] int made_events();

/// The number of times that the program asked where memory lies, since the boot.
[[nodiscard]] int pointer_queries();

/// The preferred NUMA node of the thread at the last allocation of pinned memory; -1 if it had none.
[[nodiscard]] int node_of_pinned_memory();

/// Makes one allocation fail for lack of memory, after `count` further ones. Making a green context counts as an
/// allocation.
void fail_allocation(int count);
/// From now until the next boot this is called before each copy is enqueued, on the thread that enqueues it. What it
/// returns is the copy's result, unless it is cudaSuccess.
void set_before_copy(std::function<cudaError_t()> call);
/// Makes one record of an event, or one wait of a stream for an event, fail after `count` further ones.
void fail_event(int count);
/// Makes memory of cudaMalloc look like an expandable segment of PyTorch: mapped without access for peers.
void map_own(const void* data);
/// From now on every call for `device` returns `error`, as after a kernel's illegal access.
void poison(int device, cudaError_t error);
/// The memory of one device from now on.
void set_memory(int device, std::size_t bytes);
/// From now on direct copies from one GPU's memory to another's deliver zeros, though access is granted.
void lie(int source, int target);
/// From now on no pool lets this GPU in.
void refuse_pool_access(int peer);
/// Whether this GPU's contexts access the memory of the peer.
[[nodiscard]] bool peer_access(int device, int peer);
/// What each access to another GPU's memory adds to the time of a copy, on the virtual clock.
void set_peer_copy_seconds(double seconds);
/// The speed of copies from one GPU's memory to another's, on the virtual clock. Until then they take no time.
void set_link(int source, int target, double bytes_per_second);
/// The same if a stream of the source copies. Until then it is as fast.
void set_push(int source, int target, double bytes_per_second);
/// The bytes that copies have moved from one GPU's memory to another's.
[[nodiscard]] std::size_t bytes_between_gpus();

/// The number of copies between GPUs and pinned memory that were enqueued since the boot.
struct HostCopies {
  int downloads = 0;  ///< from a GPU
  int uploads = 0;
  friend bool operator==(const HostCopies&, const HostCopies&) = default;
  friend HostCopies operator-(const HostCopies& end, const HostCopies& begin) {
    return {end.downloads - begin.downloads, end.uploads - begin.uploads};
  }
};
[[nodiscard]] HostCopies host_copies();
/// Stops the stream until it is resumed.
void hang(cudaStream_t stream);
void go_on(cudaStream_t stream);

/// The SMs that the stream's work may use, ascending.
[[nodiscard]] std::vector<int> sms_of(cudaStream_t stream);

/// For a kernel's twin: the memory that it touches, and its time on the virtual clock of event timings.
void reads(const void* data, std::size_t bytes);
void writes(const void* data, std::size_t bytes);
void takes(double seconds);

struct Launch {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

/// Copies a launch's arguments from their addresses and returns the function to run.
using Bind = std::function<std::function<void()>(const Launch&, void** arguments)>;
void set_twin(const void* kernel, Bind bind);

/// Sets the function that runs when `kernel` is launched. A kernel without a twin ends the program.
template <class... A>
void twin(void (*kernel)(A...), std::type_identity_t<std::function<void(const Launch&, A...)>> body) {
  set_twin(reinterpret_cast<const void*>(kernel), [body](const Launch& launch, void** arguments) {
    const auto copy = [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::tuple<A...>(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
    };
    return std::function<void()>([body, launch, values = copy(std::index_sequence_for<A...>{})] {
      std::apply([&](const A&... a) { body(launch, a...); }, values);
    });
  });
}

}  // namespace fake

// SPDX-License-Identifier: Apache-2.0
//
// An executing fake of the CUDA runtime: the same entry points, but streams are queues in this process, kernels run as
// functions on the host, and a seeded scheduler decides when. Linked in place of the static runtime, it lets the
// product's own object files run on a machine without a GPU, and checks what a GPU would only get wrong now and then:
//
//   - Any order that CUDA allows is legal, so work runs as late as the seed likes. Nothing runs "at once".
//   - Every access of a kernel or copy is compared with all earlier ones of the same bytes: two of which one writes
//   must
//     be ordered by streams, events or a host that saw the first one finished (vector clocks, as in data race
//     detection). A missing wait is found whatever order the seed chose.
//   - Memory is poisoned when it is given out and when it is taken back.
//   - A call that would make GPU 0's context, because its thread has none, is reported (use_context).
//   - Waiting for an event that was never recorded, which CUDA takes for a wait that is over, ends the program.
//
// Only what the product calls is there; a new entry point fails at link time.
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
  std::size_t memory_bytes = std::size_t{1} << 30;  ///< of each device
  std::string model{};                              ///< of each device; empty: "Fake GPU" and its number
  int multiprocessors = 132;
  int sm_granularity = 8;  ///< green contexts have a multiple of it
  int driver_version = 13000;
  bool driver_present = true;
  bool eager = false;           ///< run everything as soon as it may, and time it by the host's clock
  std::uint64_t lag = 0;        ///< an event looks undone until the program has asked about events so often
  bool foreign_memory = false;  ///< memory that no device has is taken for somebody else's, and not checked
};

/// A machine as after boot, and no context current to the calling thread. What the last one still held is forgotten.
void boot(const Settings& settings);
/// What makes the program give back what it keeps for later: called before leftovers are counted, and before a boot.
void set_release(void (*release)());

/// What the program has not given back, and what it enqueued that has not run.
struct Leftovers {
  std::size_t device_allocations = 0;
  std::size_t host_allocations = 0;
  std::size_t pools = 0;
  std::size_t streams = 0;  ///< those of green contexts included
  std::size_t events = 0;
  std::size_t green_contexts = 0;
  std::size_t queued = 0;
  friend bool operator==(const Leftovers&, const Leftovers&) = default;
};
[[nodiscard]] Leftovers leftovers();

/// Sentences about accesses without an order, outside of an allocation, or of freed memory, and about calls of a thread
/// that had no context. Empty: all was well.
[[nodiscard]] std::vector<std::string> problems();

/// Calls that hold a host thread until the GPU is done: cudaFreeHost while work is under way. There is no
/// cuda*Synchronize to link to.
[[nodiscard]] int synchronize_calls();

/// The NUMA node that the thread which last took pinned memory had asked for; -1: none.
[[nodiscard]] int node_of_pinned_memory();

/// The allocation after `count` further ones fails for lack of memory, once. Making a green context is one.
void fail_allocation(int count);
/// From now on every call that concerns `device` gives `error`, as after a kernel's illegal access.
void poison(int device, cudaError_t error);
/// The stream runs nothing any more, until it is told to go on.
void hang(cudaStream_t stream);
void go_on(cudaStream_t stream);

/// The SMs that what is enqueued on the stream may use, ascending.
[[nodiscard]] std::vector<int> sms_of(cudaStream_t stream);

/// For the twin of a kernel: what it touches, and how long it takes on the virtual clock of event timings.
void reads(const void* data, std::size_t bytes);
void writes(const void* data, std::size_t bytes);
void takes(double seconds);

struct Launch {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

/// A launch whose arguments were taken, ready to run. From the addresses of the arguments.
using Bind = std::function<std::function<void()>(const Launch&, void** arguments)>;
void set_twin(const void* kernel, Bind bind);

/// What runs when `kernel` is launched. A kernel without a twin ends the program.
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

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <paceline/export.hpp>
#include <paceline/runtime/dtype.hpp>
#include <paceline/runtime/native_stream.hpp>
#include <paceline/runtime/reduce_op.hpp>

namespace paceline {

/// A point in the work of a stream, set by Stream::record(). Waiting for an event that was never recorded is an error.
class PACELINE_API Event {
 public:
  virtual ~Event();
  /// Whether the device has reached this point. Never blocks.
  /// @throws Error if the device has failed.
  [[nodiscard]] virtual bool done() const = 0;
  /// Seconds from `begin` to this event, by the device's clock. Both events are timed, recorded, done, and on one
  /// device.
  /// @throws Error if the device has failed, or if an event does not meet these conditions.
  [[nodiscard]] virtual double seconds_since(const Event& begin) const = 0;
  /// The name of the device whose stream recorded it.
  [[nodiscard]] virtual std::string device() const = 0;
};

/// Memory that this object owns. Device memory returns in the order of the stream it was allocated for, so work
/// enqueued before the destruction can still use it.
class PACELINE_API Buffer {
 public:
  virtual ~Buffer();
  [[nodiscard]] virtual void* data() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
};

/// output[i] = op over k of inputs[k][i], i < count. ReduceOp defines the arithmetic, and the result has the bits of
/// the host's (only the bits of a NaN may differ). All memory belongs to the stream's device; any alignment works. The
/// output is one of the inputs or overlaps none of them.
struct DeviceReduction {
  std::span<const void* const> inputs;
  void* output = nullptr;
  std::size_t count = 0;  ///< in elements
  DType dtype = DType::float32;
  double scale = 1.0;  ///< factor for a sum of floating-point elements, applied before rounding
  ReduceOp op = ReduceOp::sum;
  std::size_t divisor = 0;  ///< for a mean: the number of values; 0 means the number of inputs
};

/// Where memory lies: a number that the backend gives each memory space of its devices.
enum class MemoryPlace : std::int32_t { host = -1 };

/// A queue of work that a device runs in order, after the calls have returned. The memory that the work uses must stay
/// alive until the device has run it. For one thread at a time.
///
/// Every call but native() throws Error if the device refuses, or if it has failed, perhaps at earlier work.
class PACELINE_API Stream {
 public:
  virtual ~Stream();
  /// The handle of the device's own library.
  [[nodiscard]] virtual NativeStream native() const noexcept = 0;
  /// Sets `event`, which belongs to this stream's device, behind all work enqueued so far.
  virtual void record(Event& event) = 0;
  /// Work enqueued from now on runs after `event`, which may belong to another device.
  virtual void wait(const Event& event) = 0;
  /// Zeroes memory of this stream's device.
  virtual void zero(void* data, std::size_t bytes) = 0;
  /// Copies between any two memories of the machine. Host memory must be pinned.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  /// The same, without asking the driver where the memory lies. For callers that copy from and to the same memory in
  /// each step: the question takes about as long as enqueuing the copy.
  virtual void copy(void* to, MemoryPlace to_place, const void* from, MemoryPlace from_place, std::size_t bytes) = 0;
  /// Asks the driver where memory lies, which holds until it is given back.
  [[nodiscard]] virtual MemoryPlace place_of(const void* data) const = 0;
  virtual void reduce(const DeviceReduction& reduction) = 0;
  /// Converts from float32 to float16 or bfloat16, rounded to nearest even (float16 becomes infinite beyond 65504), or
  /// back. The memory belongs to the stream's device, is aligned to its elements and does not overlap.
  /// @throws InvalidArgument for any other two types.
  virtual void convert(void* to, DType to_type, const void* from, DType from_type, std::size_t count) = 0;
};

/// Memory that gets a copy, and the stream in whose order it gets it.
struct Receiver {
  Stream* stream = nullptr;
  void* to = nullptr;
};

/// How copies between the memories of two GPUs go.
enum class LinkKind : std::uint8_t {
  nvlink,
  pcie_peer,
  through_host,
  wrong_peer,  ///< through the host, because CUDA grants access, but what the GPUs copied directly arrived wrong
};
/// "NVLink", "PCIe peer", "through the host", "through the host, because direct copies arrived wrong"
[[nodiscard]] PACELINE_API const char* name_of(LinkKind kind) noexcept;

/// A device whose work runs after the call that enqueued it, with its streams, events and memory. Every call throws
/// Error if the device refuses.
class PACELINE_API AsyncDevice {
 public:
  virtual ~AsyncDevice();
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream() = 0;
  /// Wraps a stream that the caller keeps owning. Null means the device's legacy default stream.
  [[nodiscard]] virtual std::unique_ptr<Stream> adopt_stream(NativeStream native) = 0;
  /// @param timed whether Event::seconds_since() will be called on it.
  [[nodiscard]] virtual std::unique_ptr<Event> make_event(bool timed) = 0;
  /// Wraps an event of this device (cudaEvent_t) that the caller has recorded and keeps owning.
  [[nodiscard]] virtual std::unique_ptr<Event> adopt_event(NativeEvent native) = 0;
  /// Uninitialised memory of the device, for use in the order of `stream`.
  /// @throws OutOfMemory naming the device and the size.
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate(std::size_t bytes, Stream& stream) = 0;
  /// Where allocate()'s memory lies.
  [[nodiscard]] virtual MemoryPlace place() const noexcept = 0;
  /// Copies the same memory of this device to several other memory spaces, each of which is named once. GPUs that do
  /// not access this device's memory upload it from one copy in pinned host memory, so it leaves this device once.
  /// Requires: what writes to `from` again comes after the work of all receivers' streams.
  virtual void copy_to_all(std::span<const Receiver> receivers, const void* from, std::size_t bytes) = 0;
  /// Host memory that every device can copy from and to.
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate_pinned(std::size_t bytes) = 0;
  /// Gives memory back that allocate() has given out and nothing uses any more. Memory whose work is pending stays.
  virtual void release_memory() = 0;
  /// The largest amount of this device's memory that allocate() has given out at once, since the device was first
  /// opened.
  [[nodiscard]] virtual std::size_t peak_bytes() const = 0;
  /// Whether this device and another one of its backend access each other's memory. If they do not, Stream::copy() goes
  /// through pinned host memory.
  [[nodiscard]] virtual bool accesses(const AsyncDevice& other) const = 0;
  /// Who makes the copies from this GPU's memory to another one's, where they access each other's memory: normally the
  /// device of the stream that is asked to copy, which mostly is the target; with `on` a stream of this GPU, which the
  /// other stream waits for. For all copies in the process from now on, as long as it has a GPU open. Any thread.
  /// @return what it was before
  virtual bool push_to(const AsyncDevice& other, bool on) = 0;
  /// How copies between this GPU's memory and another one's go. Where they access each other's memory: NVLink if CUDA
  /// says that the link has native atomics, which PCIe lacks.
  [[nodiscard]] virtual LinkKind link_to(const AsyncDevice& other) const = 0;
  /// Whether kernels of such devices may access this memory of this device. Memory of allocate() always is; memory of
  /// the program's own pools and mappings may not be.
  [[nodiscard]] virtual bool shares(const void* data) const = 0;
};

/// Waits until the event is done. Polls without a pause for 50 us, then with growing pauses of at most 100 us. Calls
/// the blocking hooks around the wait.
/// @throws Timeout naming the device after `timeout`; Error if the device has failed; what the poll hook throws.
PACELINE_API void wait_for(const Event& event, std::chrono::nanoseconds timeout = std::chrono::nanoseconds::max());
/// Throws the Timeout of wait_for().
[[noreturn]] PACELINE_API void throw_late(const Event& event, std::chrono::nanoseconds timeout);

}  // namespace paceline

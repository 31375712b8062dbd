// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include <paceline/export.hpp>
#include <paceline/runtime/dtype.hpp>
#include <paceline/runtime/reduce_op.hpp>

namespace paceline {

/// A point in the work of a stream, once it has been recorded there. Waiting for one that was not is an error.
class PACELINE_API Event {
 public:
  virtual ~Event();
  /// Whether the device has come to it. Never blocks.
  /// @throws Error if the device has failed.
  [[nodiscard]] virtual bool done() const = 0;
  /// Seconds of the device's own clock from `begin` to here, both timed, recorded and done, on one device.
  /// @throws Error if the device has failed, or one of them is not as said.
  [[nodiscard]] virtual double seconds_since(const Event& begin) const = 0;
  /// The name of the device that it is recorded on.
  [[nodiscard]] virtual std::string device() const = 0;
};

/// Memory that goes back when this is destroyed: of a device in the order of the stream it was taken for, so that work
/// enqueued before still finds it.
class PACELINE_API Buffer {
 public:
  virtual ~Buffer();
  [[nodiscard]] virtual void* data() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
};

/// output[i] = op over k of inputs[k][i], as reduce_block defines it (paceline/comm/reduce.hpp): in the order of the
/// inputs, half types in float32 and rounded once. Everything lies in the memory of the stream's device, however it is
/// aligned; the output may be one of the inputs, else it overlaps none.
struct DeviceReduction {
  std::span<const void* const> inputs;
  void* output = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
  double scale = 1.0;  ///< a sum of floating-point elements is multiplied by it before it is rounded
  ReduceOp op = ReduceOp::sum;
  std::size_t divisor = 0;  ///< of a mean: of how many values; 0: of as many as there are inputs
};

/// A queue of work that a device does in order, after the calls have returned. What it reads and writes must stay alive
/// until the device has done it. One thread at a time.
///
/// Every call but native() throws Error where the device refuses or has failed, perhaps at earlier work.
class PACELINE_API Stream {
 public:
  virtual ~Stream();
  /// What the device's own library calls it (cudaStream_t).
  [[nodiscard]] virtual void* native() const noexcept = 0;
  /// `event` is from now on the point behind all that was enqueued so far; it belongs to this stream's device.
  virtual void record(Event& event) = 0;
  /// What is enqueued from now on runs after `event`, which may be another device's.
  virtual void wait(const Event& event) = 0;
  /// Memory of this stream's device.
  virtual void zero(void* data, std::size_t bytes) = 0;
  /// Between any two memories of the machine; on the host only pinned ones.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void reduce(const DeviceReduction& reduction) = 0;
};

/// A device whose work runs after the call that enqueued it: streams, events and memory of it. Every call throws Error
/// where the device refuses.
class PACELINE_API AsyncDevice {
 public:
  virtual ~AsyncDevice();
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream() = 0;
  /// The caller's own stream; it stays the caller's. Null: the device's legacy default stream.
  [[nodiscard]] virtual std::unique_ptr<Stream> adopt_stream(void* native) = 0;
  /// @param timed whether Event::seconds_since() is wanted of it.
  [[nodiscard]] virtual std::unique_ptr<Event> make_event(bool timed) = 0;
  /// Memory of the device, of any content, to be used in the order of `stream`.
  /// @throws OutOfMemory naming the device and the size.
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate(std::size_t bytes, Stream& stream) = 0;
  /// Host memory that copies of every device reach.
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate_pinned(std::size_t bytes) = 0;
  /// The most that allocate() had given out at once, of this device's memory, since somebody first opened it.
  [[nodiscard]] virtual std::size_t peak_bytes() const = 0;
};

/// Waits until the event is done, by asking again and again: without a pause for 50 us, then less and less often, at
/// least every 100 us. The blocking hooks are called around it.
/// @throws Timeout naming the device if it takes longer than `timeout`; Error if the device has failed; what the poll
/// hook throws.
PACELINE_API void wait_for(const Event& event, std::chrono::nanoseconds timeout = std::chrono::nanoseconds::max());
/// The Timeout that says that.
[[noreturn]] PACELINE_API void throw_late(const Event& event, std::chrono::nanoseconds timeout);

}  // namespace paceline

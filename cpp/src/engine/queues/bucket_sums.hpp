// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/async_device.hpp>

#include "runtime/issuing_thread.hpp"

namespace paceline::internal {

inline constexpr std::size_t kHome = 0;  ///< the memory space of the first GPU

/// A memory space whose devices give buckets, and the stream that pulls and sums in it. The first one is home's.
struct SumSpace {
  AsyncDevice* maker = nullptr;
  Stream* stream = nullptr;  ///< null: host memory, which others only read
};

/// Where a device's buckets lie, and the stream that writes them; null on the host, and for home's own stream.
struct SumSource {
  std::size_t space = 0;
  AsyncDevice* device = nullptr;
  Stream* stream = nullptr;
};

/// Sums the buckets of a step's devices at home, one after the other in a fixed order, while devices still compute.
///
/// A bucket is summed as soon as every device that takes part has sealed it, and all buckets before it are summed. The
/// work is copies and one kernel for each slice, ordered by events; nothing spins. With three memory spaces of GPUs or
/// more, each of these but home sums a slice of the bucket: it pulls the slice from the others, and home pulls the
/// sums. So with one device on each GPU, each sends the bucket once and gets it once. With two, home pulls the bucket;
/// if host devices take part, too, each of the two sums a half. Large buckets go in chunks.
///
/// Each sum adds the devices in the order of the group, so that the result has the bits of the host's.
///
/// The device that seals last is the slowest one, and the sum of a bucket of eight GPUs takes some 120 calls of the
/// driver. So with a `pump` a thread makes these calls, and seal() only notes what is sealed. The order of the sums
/// stays. The pump and others who use the streams take turns by settle(). What the pump met is thrown by each later
/// seal() of the step, that is, where a device has a micro-batch to blame, and by finish(). What it met in copies also
/// by those who wait for them. After an OutOfMemory who seals makes the calls, until a step has got its sums: then the
/// error comes with the micro-batch that is too large.
///
/// The pump also does what comes before the sums of a step, by the same rules: first().
///
/// A pump that is left behind, because a call of its own does not return, enqueues nothing after that call. This one
/// call may still enqueue its work when it returns: on the memory of buckets and outputs, which the caller may have
/// freed. It is one copy, kernel or allocation, or all chunks of one copy through the host (cuda/host_path.hpp). The
/// same holds for a pump whose cancel() was interrupted.
///
/// With `travels`, sums of float32 go between GPUs in that half type. Each device's bucket is rounded to it once, then
/// added in float32, and the sum is rounded once. What a GPU reads in its own memory is rounded, too, so the result
/// does not depend on who sums what. The space that holds a bucket rounds it; home does so
/// with the host's buckets, which come in float32. With fewer than two GPUs nothing is rounded.
///
/// The order of the work, and the wait that enforces it:
///
///   1. A space pulls and sums a bucket after every device has written it. Its stream waits for each `sealed`.
///   2. Home pulls a slice after its sum. Home's stream waits for the space's `summed`.
///   3. A space overwrites a sum after home has pulled it. Its stream waits for the `pulled` of two chunks before.
///   4. With `travels`, a space rounds its buckets after its devices have written them, and into memory that others
///      have read: its stream waits for each `sealed` and for that `pulled`. A space reads what another one has
///      rounded after the other's `rounded`.
///   5. What home's stream gets later runs after all reading: home waits for every sum, and a sum for its pulls.
class BucketSums {
 public:
  /// `pump`: a thread of this object enqueues the sums, and others wait for it for so long at most. Without it, the
  /// thread that seals last enqueues them.
  BucketSums(std::vector<SumSpace> spaces, const std::vector<SumSource>& sources, std::size_t chunk_bytes,
             std::optional<DType> travels = std::nullopt, std::optional<std::chrono::nanoseconds> pump = std::nullopt);

  /// Home's stream from now on. Memory for the old one returns in its order. Requires: settle().
  void use(Stream& home);
  /// Begins a step. `takes_part`: per source; empty: all. Nothing is summed before expect().
  void begin(const std::vector<bool>& takes_part);
  /// Lets the pump do this before the step's sums. Without one, or if it has run out of memory, does it at once. Before
  /// each call of a device the work calls check().
  void first(std::function<void()> work);
  /// Notes whose device is called next. @throws Cancelled if the caller no longer waits for the work
  void check(std::size_t space);
  /// Before anybody seals: outputs[k] = scale * the sum of all k-th buckets, at home.
  void expect(std::span<const BufferView> outputs, double scale);
  /// The source's k-th bucket is final; work on its stream so far has written it, or what this event of the caller
  /// follows. Sealed again: it is summed again, in the end. Any thread. @throws also what the pump met in this step
  void seal(std::size_t source, std::size_t k, const BufferView& bucket, NativeEvent written = nullptr);
  /// Sums what is left. Devices that have sealed nothing give nothing. @throws also what the pump met in this step
  void finish();
  /// Returns when the pump has enqueued what it can, so that the caller may use the streams.
  /// @throws Timeout naming the device whose call did not return in that time (without one: in the pump's); then the
  /// pump is left behind
  void settle(std::optional<std::chrono::nanoseconds> timeout = std::nullopt,
              IssuingThread::Interrupt interrupt = IssuingThread::Interrupt::no);
  /// Like settle(), but lets the pump enqueue nothing more in this step.
  /// @throws also what the poll hook of waits throws; then the pump may still be in a call
  void cancel();
  /// What owns this object and the streams. The pump keeps it while it works, because it may never come back.
  void set_owner(std::weak_ptr<void> owner) { owner_ = std::move(owner); }
  /// Ends the pump. If it does not return within `timeout`, it is left behind, and enqueues nothing more.
  void close(std::chrono::nanoseconds timeout);

 private:
  struct Bucket {
    const void* data = nullptr;
    MemoryPlace memory{};                    // of the data, which mostly stays from step to step
    std::shared_ptr<Event> own{};            // null without a stream
    std::shared_ptr<const Event> written{};  // our own, or one of the caller's; null without a stream
    bool sealed = false;
  };
  struct Source : SumSource {
    bool takes_part = true;
    std::vector<Bucket> buckets{};
  };
  /// What a source gives to the bucket that is being summed, which may be sealed again meanwhile.
  struct Part {
    Bucket bucket{};
    std::size_t space = 0;
    const void* chunk = nullptr;  // in the type that travels
    MemoryPlace memory{};
    std::size_t place = 0;  // the space where the chunk is
  };
  struct Space : SumSpace {
    std::unique_ptr<Buffer> landing{};    // what was pulled from others
    std::unique_ptr<Buffer> sums[2]{};    // of slices, until home has pulled them; at home only if it is widened then
    std::unique_ptr<Buffer> halves[2]{};  // what its devices give, rounded, until the others have pulled it
    std::unique_ptr<Event> rounded{};
    std::unique_ptr<Event> summed{};
  };

  /// Elements [begin, end) of a chunk, and the space that sums them.
  struct Slice {
    std::size_t space = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
    void* sum = nullptr;
  };

  enum class Pump { idle, runs, stopped };  // stopped: nobody wakes it before the next step

  [[nodiscard]] static bool has(const Source& source, std::size_t k);
  /// Whether the next bucket can be summed.
  [[nodiscard]] bool is_due() const;
  void start_pump(std::function<void()> first);
  void pump(const std::function<void()>& first);
  void stop_pump();
  /// The space's stream, for one call. @throws Cancelled if the caller no longer waits for the sums
  [[nodiscard]] Stream& on(std::size_t space);
  /// Copies what the sources give to the bucket.
  void take(std::size_t k);
  void take_and_sum(std::size_t k);
  [[nodiscard]] std::vector<std::size_t> owners(std::size_t k) const;
  /// Enqueues the sum of what was taken.
  void sum(std::size_t k);
  void sum_chunk(std::size_t k, std::span<const std::size_t> owners, std::size_t begin, std::size_t end);
  /// Rounds what each space gives to elements [begin, begin + count), and lets the owners wait for it.
  void round(std::span<const std::size_t> owners, std::size_t begin, std::size_t count);
  void sum_slice(const Slice& slice, DType dtype);
  [[nodiscard]] bool rounds(DType dtype) const { return travels_.has_value() && dtype == DType::float32; }

  std::mutex mutex_;  // not held while the pump enqueues
  std::vector<Space> spaces_;
  std::vector<Source> sources_;
  std::size_t chunk_bytes_;
  std::optional<DType> travels_;
  std::unique_ptr<Event> pulled_[2];
  std::size_t parity_ = 0;
  std::vector<BufferView> outputs_;  // the first count_ of them are this step's; others are of steps before
  std::vector<MemoryPlace> memory_of_outputs_;
  std::size_t count_ = 0;
  double scale_ = 1.0;
  std::size_t next_ = 0;     // the buckets before it are summed
  std::vector<bool> again_;  // sealed again after that
  std::vector<Part> parts_;  // of the bucket that is being summed
  std::chrono::nanoseconds timeout_{};
  std::atomic<std::size_t> at_ = kHome;  // the space whose device was called last
  Pump pump_state_ = Pump::idle;
  bool pump_rests_ = false;             // it ran out of memory, and no step has got its sums since
  std::atomic<bool> cancelled_{false};  // in this step
  std::exception_ptr error_;            // of the pump, in this step
  std::weak_ptr<void> owner_;
  std::unique_ptr<IssuingThread> pump_;  // null: there is none
};

}  // namespace paceline::internal

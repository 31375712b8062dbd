// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/async_device.hpp>

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
///   have
///      read: its stream waits for each `sealed` and for that `pulled`. A space reads what another one has rounded
///      after the other's `rounded`.
///   5. What home's stream gets later runs after all reading: home waits for every sum, and a sum for its pulls.
class BucketSums {
 public:
  BucketSums(std::vector<SumSpace> spaces, const std::vector<SumSource>& sources, std::size_t chunk_bytes,
             std::optional<DType> travels = std::nullopt);

  /// Home's stream from now on. Memory for the old one returns in its order.
  void use(Stream& home);
  /// Begins a step. `takes_part`: per source; empty: all. outputs[k] = scale * the sum of all k-th buckets, at home.
  void begin(const std::vector<bool>& takes_part, std::span<const BufferView> outputs, double scale);
  /// The source's k-th bucket is final; work on its stream so far has written it, or what this event of the caller
  /// follows. Sealed again: it is summed again, in the end. Any thread.
  void seal(std::size_t source, std::size_t k, const BufferView& bucket, NativeEvent written = nullptr);
  /// Sums what is left. Devices that have sealed nothing give nothing.
  void finish();

 private:
  struct Bucket {
    const void* data = nullptr;
    MemoryPlace memory{};              // of the data, which mostly stays from step to step
    std::unique_ptr<Event> own{};      // null without a stream
    std::unique_ptr<Event> adopted{};  // of the caller, in place of our own
    const Event* written = nullptr;    // one of the two
    bool sealed = false;
  };
  struct Source : SumSource {
    bool takes_part = true;
    std::vector<Bucket> buckets{};
    const void* chunk = nullptr;  // of the bucket that is being summed, in the type that travels
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

  [[nodiscard]] static bool has(const Source& source, std::size_t k);
  [[nodiscard]] bool complete(std::size_t k) const;
  [[nodiscard]] std::vector<std::size_t> owners(std::size_t k) const;
  void sum(std::size_t k);
  void sum_chunk(std::size_t k, std::span<const std::size_t> owners, std::size_t begin, std::size_t end);
  /// Rounds what each space gives to elements [begin, begin + count), and lets the owners wait for it.
  void round(std::size_t k, std::span<const std::size_t> owners, std::size_t begin, std::size_t count);
  void sum_slice(std::size_t k, const Slice& slice, DType dtype);
  [[nodiscard]] bool rounds(DType dtype) const { return travels_.has_value() && dtype == DType::float32; }

  std::mutex mutex_;
  std::vector<Space> spaces_;
  std::vector<Source> sources_;
  std::size_t chunk_bytes_;
  std::optional<DType> travels_;
  std::unique_ptr<Event> pulled_[2];
  std::size_t parity_ = 0;
  std::vector<BufferView> outputs_;
  std::vector<MemoryPlace> memory_of_outputs_;
  double scale_ = 1.0;
  std::size_t next_ = 0;     // the buckets before it are summed
  std::vector<bool> again_;  // sealed again after that
};

}  // namespace paceline::internal

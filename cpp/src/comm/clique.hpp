// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline::internal {

/// One memory space that takes part. Shared: work that no longer ends may still refer to it.
struct Rank {
  Device device;
  std::shared_ptr<AsyncDevice> opened;
  std::shared_ptr<Stream> stream;  ///< all the clique's work on this device is enqueued here
};

/// What moves data between memory spaces: NCCL, or copies. At least two ranks.
///
/// Everything is enqueued on the ranks' streams, and the calls come back without waiting for a device. What fails
/// later, check() and the next call throw. One thread at a time.
class Clique {
 public:
  virtual ~Clique();

  /// "NCCL 2.30.7 (/path)"
  [[nodiscard]] virtual std::string description() const = 0;
  /// buffers[r] of every rank = op over all of them, in place: sum, min or max (as reduce_block defines them).
  virtual void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) = 0;
  /// parts[r] = the r-th of as many equal parts of op over all wholes. It may be the r-th part of wholes[r].
  virtual void reduce_scatter(std::span<const void* const> wholes, std::span<void* const> parts, std::size_t part_count,
                              DType dtype, ReduceOp op) = 0;
  /// Every rank's buffer = the r-th part of buffers[r], for all r, one after the other.
  virtual void all_gather(std::span<void* const> buffers, std::size_t part_bytes) = 0;
  /// buffers[r] of every rank = buffers[root].
  virtual void broadcast(std::span<void* const> buffers, std::size_t bytes, std::size_t root) = 0;
  /// Throws what has failed since the last call, once. What was enqueued before an event that is done is known here.
  virtual void check() = 0;
  /// Gives up what is under way and late, so that devices that wait for each other go on. The next call begins anew.
  virtual void give_up() = 0;
  /// Gives everything back. @throws Timeout if that does not end: what hangs is left behind.
  virtual void close() = 0;
};

/// One whose devices reach into each other's memory by themselves, as NCCL's kernels do. The memory should be of its
/// own: what others have allocated may be out of the other devices' reach.
class NativeClique : public Clique {
 public:
  /// buffers[root] = the sum of every rank's; the others are only read.
  virtual void reduce(std::span<void* const> buffers, std::size_t count, DType dtype, std::size_t root) = 0;
  /// Memory of a rank for collectives, registered where the library can. Goes back before the clique does, when nothing
  /// uses it any more; where it comes from the device's pool, in the order of `stream`.
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate(std::size_t rank, std::size_t bytes, Stream& stream) = 0;
  /// While true, what goes back stays for good: something enqueued may still use it.
  virtual void keep_memory(bool keep) noexcept = 0;
  /// Whether it is of no use any more: a call never came back.
  [[nodiscard]] virtual bool lost() const noexcept = 0;
};

/// The GPUs' own library, between GPUs with a memory space each. Null if there is none to use; `why_none` then says
/// why. cuda/nccl_clique.cpp defines it, or host_only.cpp in a build without the CUDA backend.
/// @throws Unavailable where the library would certainly hang; Error, Timeout if it cannot connect the GPUs.
[[nodiscard]] std::unique_ptr<NativeClique> make_native_clique(const std::vector<Rank>& ranks,
                                                               const CommunicatorOptions& options,
                                                               std::string& why_none);

/// @throws Unavailable if there is nothing of the kind asked for: why.
[[nodiscard]] std::unique_ptr<Clique> make_clique(std::vector<Rank> ranks, const CommunicatorOptions& options);

/// By copies through the first rank's memory. Always works; the first rank's links carry everything.
[[nodiscard]] std::unique_ptr<Clique> make_copy_clique(std::vector<Rank> ranks, std::string why);

}  // namespace paceline::internal

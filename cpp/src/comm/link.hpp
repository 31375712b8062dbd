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

/// One memory space that takes part. Its parts are shared, because work that never ends may still use them.
struct Endpoint {
  Device device;
  std::shared_ptr<AsyncDevice> opened;
  std::shared_ptr<Stream> stream;  ///< the link enqueues all its work on this device here
};

/// Grows the buffer to at least this size, if it is smaller, and returns its memory, for use on that stream.
[[nodiscard]] void* reserve(std::unique_ptr<Buffer>& buffer, std::size_t bytes, AsyncDevice& device, Stream& stream);

/// Moves data between two or more memory spaces, by NCCL or by copies.
///
/// The calls enqueue work on the endpoints' streams and return without waiting for a device. check() and the next call
/// throw what fails later. One thread at a time.
class Link {
 public:
  virtual ~Link();

  /// "NCCL 2.30.7 (/path)"
  [[nodiscard]] virtual std::string description() const = 0;
  /// Every buffers[r] = op over all buffers, in place. op is sum, min or max.
  virtual void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) = 0;
  /// parts[r] = the r-th part of op over all wholes, with one equal part per endpoint. It may be the r-th part of
  /// wholes[r].
  virtual void reduce_scatter(std::span<const void* const> wholes, std::span<void* const> parts, std::size_t part_count,
                              DType dtype, ReduceOp op) = 0;
  /// The r-th part of every buffer = the r-th part of buffers[r], for all r.
  virtual void all_gather(std::span<void* const> buffers, std::size_t part_bytes) = 0;
  /// Every buffers[r] = buffers[root].
  virtual void broadcast(std::span<void* const> buffers, std::size_t bytes, std::size_t root) = 0;
  /// Throws what has failed since the last call, once. It knows about all work enqueued before an event that is done.
  virtual void check() = 0;
  /// Gives up work that is under way and late, so that devices that wait for each other go on. The next call starts
  /// anew.
  virtual void give_up() = 0;
  /// Releases everything. @throws Timeout if that does not end; what hangs is left behind.
  virtual void close() = 0;
};

/// A link whose devices access each other's memory themselves, as NCCL's kernels do. Use memory from allocate(): the
/// other devices may not reach memory that somebody else allocated.
class NativeLink : public Link {
 public:
  /// buffers[root] = the sum of all buffers. The other buffers are only read.
  virtual void reduce(std::span<void* const> buffers, std::size_t count, DType dtype, std::size_t root) = 0;
  /// Memory of an endpoint for collectives, registered if the library can. Destroy it before the link, when nothing
  /// uses it any more. If it comes from the device's pool, it returns in the order of `stream`.
  [[nodiscard]] virtual std::unique_ptr<Buffer> allocate(std::size_t endpoint, std::size_t bytes, Stream& stream) = 0;
  /// While true, destroyed memory is never released, because enqueued work may still use it.
  virtual void keep_memory(bool keep) noexcept = 0;
  /// Whether the link is unusable, because a call never returned.
  [[nodiscard]] virtual bool lost() const noexcept = 0;
};

/// A link by the GPUs' own library. Null if there is none to use; `why_none` then says why. cuda/nccl_link.cpp defines
/// this function, or host_only.cpp in a build without the CUDA backend.
/// @throws Unavailable where the library would certainly hang; Error, Timeout if it cannot connect the GPUs.
[[nodiscard]] std::unique_ptr<NativeLink> make_native_link(const std::vector<Endpoint>& endpoints,
                                                           const CommunicatorOptions& options, std::string& why_none);

/// @throws Unavailable if the transport asked for is not available, with the reason.
[[nodiscard]] std::unique_ptr<Link> make_link(std::vector<Endpoint> endpoints, const CommunicatorOptions& options);

/// A link by copies. It always works. An all_reduce goes through the first endpoint's memory.
[[nodiscard]] std::unique_ptr<Link> make_copy_link(const std::vector<Endpoint>& endpoints, std::string why);

}  // namespace paceline::internal

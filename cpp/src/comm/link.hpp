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

/// Data with a place in the memory of every endpoint, at[r] for endpoint r.
struct Piece {
  std::vector<void*> at{};
  std::size_t root = 0;  ///< the endpoint that has the data, or gets it
};

/// Moves data between two or more memory spaces, by NCCL or by copies.
///
/// The calls enqueue work on the endpoints' streams and return without waiting for a device. check() and the next call
/// throw what fails later. One thread at a time.
class Link {
 public:
  virtual ~Link();

  /// "NCCL 2.30.7 (/path)"
  [[nodiscard]] virtual std::string description() const = 0;
  /// Whether its kernels access the buffers of other devices. Otherwise it only copies.
  [[nodiscard]] virtual bool accesses_peers() const noexcept { return false; }
  /// Every buffers[r] = op over all buffers, in place. op is sum, min or max.
  virtual void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) = 0;
  /// For each piece: at[root] = op over all of `at`. The others are only read. No two pieces overlap.
  virtual void reduce(std::span<const Piece> pieces, std::size_t count, DType dtype, ReduceOp op) = 0;
  /// For each piece: every at[r] = at[root]. No two pieces overlap.
  virtual void broadcast(std::span<const Piece> pieces, std::size_t bytes) = 0;
  /// Throws what has failed since the last call, once. It knows about all work enqueued before an event that is done.
  virtual void check() = 0;
  /// Gives up work that is under way and late, so that devices that wait for each other go on. The next call starts
  /// anew.
  virtual void give_up() = 0;
  /// Releases everything. @throws Timeout if that does not end; what hangs is left behind.
  virtual void close() = 0;
  /// Whether the link is unusable, because a call never returned.
  [[nodiscard]] virtual bool lost() const noexcept { return false; }
};

/// A link by the GPUs' own library. Null if there is none to use; `why_none` then says why. cuda/nccl_link.cpp defines
/// this function, or host_only.cpp in a build without the CUDA backend.
/// Its devices access each other's memory themselves, as NCCL's kernels do. They reach the memory of AsyncDevice, and
/// may be unable to reach memory that somebody else allocated. So SpaceCollectives gives the link only memory of
/// AsyncDevice, and AsyncCollectives only what AsyncDevice::shares().
/// @throws Unavailable where the library would certainly hang; Error, Timeout if it cannot connect the GPUs.
[[nodiscard]] std::unique_ptr<Link> make_native_link(const std::vector<Endpoint>& endpoints,
                                                     const CommunicatorOptions& options, std::string& why_none);

/// @throws Unavailable if the transport asked for is not available, with the reason.
[[nodiscard]] std::unique_ptr<Link> make_link(std::vector<Endpoint> endpoints, const CommunicatorOptions& options);

/// A link by copies. It always works. An all_reduce goes through the first endpoint's memory.
[[nodiscard]] std::unique_ptr<Link> make_copy_link(const std::vector<Endpoint>& endpoints, std::string why);

}  // namespace paceline::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

namespace internal {
class Collectives;
}

/// What moves data between GPUs: NCCL, copies through the first GPU's memory, or NCCL where it is found and else
/// copies.
enum class Transport : std::uint8_t { automatic, nccl, copies };

struct CommunicatorOptions {
  Transport transport = Transport::automatic;
  /// How long NCCL may take: for a collective, from the moment when every GPU has come to it; for making the
  /// connections; for a call to return. wait(), and a call that waits, may take twice as long: once for what the
  /// buffers' streams were given before, once for the collectives.
  std::chrono::nanoseconds timeout = std::chrono::minutes(1);
  /// The largest message of the warm-up. With the first message of a size NCCL makes the connections that it uses for
  /// such sizes, which takes memory and time. 0: no warm-up.
  std::size_t warm_up_bytes = std::size_t{4} << 20;
};

/// Collectives over one buffer per device of a group, in place, and sends from one device to another.
///
/// Every call checks everything first and throws InvalidArgument, naming the buffer, before anything is written:
/// one buffer per device in the order of the group; one element type and one size; memory that is there; and no
/// overlap, except where in-place use is named below. What is only read may be given twice.
///
/// Host devices: nothing is copied. All workers work together: each takes the next cache-sized block until none is
/// left, so that a worker on a busy core holds up nobody. Small messages are done by the calling thread, which is
/// sooner than waking anybody. Either way the result is the same to the bit (see reduce_block), in every run and for
/// every order in which workers arrive. Calls block until the result is there.
///
/// GPUs, parts of one GPU, and both beside host devices: each memory space is reduced first, by a kernel of its own or
/// by the host's workers; then the spaces, by NCCL or by copies; then the result goes to the space's other devices.
/// Every operation means what it means on the host (see reduce_block), for every element type. Parts of one GPU give
/// the host's result to the bit. With more memory spaces a floating-point result is rounded after each of these
/// stages, of which a mean is divided in the first; minima and maxima of floating-point elements go by copies even
/// where there is NCCL, whose own drop NaNs.
/// Work is only enqueued: it comes after what the buffers' streams have been given before (see BufferView), and what
/// they are given afterwards comes after it. Only where the group has host devices, whose memory has no stream, does a
/// call wait for the result.
/// Errors of a GPU or of NCCL that show later are thrown by wait() or the next call, which then does nothing; the one
/// after it makes new connections. What the buffers hold after such an error is not defined.
///
/// Threads: one call at a time per group, and none while the group runs something else (InvalidArgument). Nor may
/// one begin inside a step or another collective, whatever the devices. A closed group throws Unavailable. Copies share
/// their state.
///
///   paceline::Communicator communicator{paceline::DeviceGroup::all(paceline::DeviceKind::host)};
///   communicator.all_reduce(gradients, paceline::ReduceOp::sum);   // gradients: one BufferView per device
class PACELINE_API Communicator {
 public:
  /// Between GPUs makes the connections, and waits until they have carried a message.
  /// @throws Unavailable if the transport asked for cannot be had; Timeout, Error if NCCL fails: on which device, how.
  explicit Communicator(DeviceGroup group, const CommunicatorOptions& options = {});

  /// buffers[d] = op over all buffers, for every d.
  void all_reduce(std::span<const BufferView> buffers, ReduceOp op = ReduceOp::sum);

  /// outputs[d] = the d-th of size() equal parts of the reduced inputs: inputs[d].count == size() * outputs[d].count.
  /// In place: outputs[d] may be the d-th part of any one input.
  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs,
                      ReduceOp op = ReduceOp::sum);

  /// outputs[d] = inputs[0] ... inputs[size()-1] one after the other: outputs[d].count == size() * inputs[d].count.
  /// In place: inputs[d] may be the d-th part of any one output.
  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs);

  /// buffers[d] = buffers[root], for every d. @throws InvalidArgument also if there is no such device.
  void broadcast(std::span<const BufferView> buffers, std::size_t root = 0);

  /// output = input: `input` lies in the memory of the device with the index `source`, `output` in that of `target`.
  /// The other devices have no part in it. GPUs copy, whatever the transport. Only a send from or to a host device
  /// waits for the result. @throws InvalidArgument also if there is no such device, or the buffers overlap.
  void send(const BufferView& input, const BufferView& output, std::size_t source, std::size_t target);

  /// Waits until all that was enqueued so far is done; of host devices nothing is.
  /// @throws what has failed since the last call; Timeout, naming the device that is late (see CommunicatorOptions).
  ///         NCCL's connections are then given up, so that the other GPUs go on, and the next call makes new ones; what
  ///         else was enqueued stays so.
  void wait();

  /// Gives back streams, memory and connections; also done by the destructor of the last copy. Idempotent; every later
  /// call throws Unavailable. Of host devices nothing is held.
  /// @throws Timeout, naming the device, if NCCL does not come back: what hangs is left behind.
  void close();

  /// How data gets from one memory space to another: "NCCL 2.30.7 (/usr/lib/libnccl.so.2)".
  [[nodiscard]] std::string description() const;

  [[nodiscard]] const DeviceGroup& group() const noexcept { return group_; }

 private:
  DeviceGroup group_;
  std::shared_ptr<internal::Collectives> collectives_;
};

}  // namespace paceline

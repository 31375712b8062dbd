// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

/// Collectives over one buffer per device of a group, in one memory space, in place and without copying.
///
/// Every call checks everything first and throws InvalidArgument, naming the buffer, before anything is written:
/// one buffer per device in the order of the group; one element type and one size; memory that is there; and no
/// overlap, except where in-place use is named below. What is only read may be given twice.
///
/// All workers work together: each takes the next cache-sized block until none is left, so that a worker on a busy core
/// holds up nobody. Small messages are done by the calling thread, which is sooner than waking anybody. Either way the
/// result is the same to the bit (see reduce_block), in every run and for every order in which workers arrive.
///
/// Calls block until the result is there. Threads: one call at a time per group, and none while the group runs
/// something else (InvalidArgument). A closed group throws Unavailable.
///
///   paceline::Communicator communicator{paceline::DeviceGroup::all(paceline::DeviceKind::host)};
///   communicator.all_reduce(gradients, paceline::ReduceOp::sum);   // gradients: one BufferView per device
class PACELINE_API Communicator {
 public:
  /// @throws InvalidArgument if the devices of the group do not share one memory space.
  explicit Communicator(DeviceGroup group);

  /// buffers[d] = op over all buffers, for every d.
  void all_reduce(std::span<const BufferView> buffers, ReduceOp op = ReduceOp::sum);

  /// outputs[d] = the d-th of size() equal parts of the reduced inputs: inputs[d].count == size() * outputs[d].count.
  /// In place: outputs[d] may be the d-th part of any one input.
  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs,
                      ReduceOp op = ReduceOp::sum);

  /// outputs[d] = inputs[0] ... inputs[size()-1] one after the other: outputs[d].count == size() * inputs[d].count.
  /// In place: inputs[d] may be the d-th part of any one output.
  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs);

  /// buffers[d] = buffers[root].
  void broadcast(std::span<const BufferView> buffers, std::size_t root = 0);

  [[nodiscard]] const DeviceGroup& group() const noexcept { return group_; }

 private:
  DeviceGroup group_;
};

}  // namespace paceline

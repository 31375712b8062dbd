// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

/// Collectives over one buffer per device of a group, in one memory space.
///
/// All workers work together, each on cache-sized blocks. Every call checks sizes and types first and throws
/// InvalidArgument before anything is written. Calls block; one at a time per group.
class PACELINE_API Communicator {
 public:
  explicit Communicator(DeviceGroup group);

  /// buffers[d] = op over all buffers, for every d.
  void all_reduce(std::span<const BufferView> buffers, ReduceOp op = ReduceOp::sum);
  /// outputs[d] = the d-th of size() equal parts of the reduced inputs: inputs[d].count == size() * outputs[d].count.
  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs,
                      ReduceOp op = ReduceOp::sum);
  /// outputs[d] = inputs[0] ... inputs[size()-1] one after the other: outputs[d].count == size() * inputs[d].count.
  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs);
  /// buffers[d] = buffers[root].
  void broadcast(std::span<const BufferView> buffers, std::size_t root = 0);

  [[nodiscard]] const DeviceGroup& group() const noexcept { return group_; }

 private:
  DeviceGroup group_;
};

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/runtime/device_group.hpp>

#include "comm/memory_spaces.hpp"

namespace paceline::internal {

/// The data of all host devices, as an input of a reduction at home.
struct HostPart {
  const void* data = nullptr;  ///< null without host devices
  std::size_t times = 1;       ///< how many times to add it
};

/// The host devices of a group with GPUs. Their data enters and leaves at `home`, the first GPU, through pinned memory.
/// All copies are enqueued on home's stream. Without host devices the functions do nothing.
class HostSide {
 public:
  /// Requires: group and memory outlive this object.
  HostSide(DeviceGroup& group, MemorySpaces& memory) : group_(group), memory_(memory) {}

  [[nodiscard]] bool empty() const noexcept { return memory_.host_devices().empty(); }

  /// Reduces the data of the host devices into home's memory. A mean of half types gives their mean, to be added once
  /// for each host device, because the type may not hold their sum. Any other mean gives the sum.
  [[nodiscard]] HostPart bring_in(std::span<const BufferView> inputs, ReduceOp op);
  /// A copy of `input` that home can read. It lies `bytes_before` behind the start of pinned memory of `all_bytes`.
  [[nodiscard]] const void* stage(const BufferView& input, std::size_t bytes_before, std::size_t all_bytes);
  /// Copies from home's memory to pinned memory, at the same place as stage().
  void take_out(const void* from, std::size_t bytes, std::size_t bytes_before, std::size_t all_bytes);
  /// Copies from a space's memory to pinned memory.
  void take_out(const Space& space, const BufferView& from);

  /// Copies what take_out() has put at element `begin` of the whole to a host buffer. Requires: the caller has waited.
  void give(const BufferView& whole, std::size_t begin, const BufferView& target);
  /// Copies the whole to every host device but `except`.
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);
  void give_all(const BufferView& whole, std::span<const BufferView> buffers, std::size_t except = kNobody);

 private:
  // The numbers of the pinned memories: to home, and from home.
  static constexpr std::size_t kIn = 0;
  static constexpr std::size_t kOut = 1;

  DeviceGroup& group_;
  MemorySpaces& memory_;
};

}  // namespace paceline::internal

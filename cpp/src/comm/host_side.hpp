// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/runtime/device_group.hpp>

#include "comm/memory_spaces.hpp"

namespace paceline::internal {

/// What the host devices have, as one of the inputs of a reduction at home.
struct HostPart {
  const void* data = nullptr;  ///< null without host devices
  std::size_t times = 1;       ///< how often it counts
};

/// The host devices of a group that has GPUs too: their data comes in at `home`, the first GPU, and goes out from
/// there, through pinned memory. Everything is enqueued on home's stream; none of it does anything where there are
/// none.
class HostSide {
 public:
  /// Both must outlive it.
  HostSide(DeviceGroup& group, MemorySpaces& memory) : group_(group), memory_(memory) {}

  [[nodiscard]] bool empty() const noexcept { return memory_.host_devices().empty(); }

  /// The sum (also for a mean), minimum or maximum of what the host devices have, in home's memory. For a mean of half
  /// types their mean, once for each of them: their sum may be more than the type holds.
  [[nodiscard]] HostPart bring_in(std::span<const BufferView> inputs, ReduceOp op);
  /// A copy that home can read: `bytes_before` from the beginning of pinned memory of `all_bytes`.
  [[nodiscard]] const void* stage(const BufferView& input, std::size_t bytes_before, std::size_t all_bytes);
  /// The same the other way.
  void take_out(const void* from, std::size_t bytes, std::size_t bytes_before, std::size_t all_bytes);

  /// What take_out() has put at element `begin` of the whole, to a host buffer. The caller has waited.
  void give(const BufferView& whole, std::size_t begin, const BufferView& target);
  /// All of it, to every host device but one.
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);
  void give_all(const BufferView& whole, std::span<const BufferView> buffers, std::size_t except = kNobody);

 private:
  // Which pinned memory: what goes to home, what comes from it.
  static constexpr std::size_t kIn = 0;
  static constexpr std::size_t kOut = 1;

  DeviceGroup& group_;
  MemorySpaces& memory_;
};

}  // namespace paceline::internal

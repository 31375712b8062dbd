// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

/// A reduction over all devices in three stages: inside each memory space, between spaces, and what remains.
///
/// Only a mean has a choice of stage. Floating-point elements are divided in the first stage: that costs no extra pass
/// and keeps half types from overflowing. Integers are divided in the last stage, because the sum must be complete.
class StagedOp {
 public:
  /// @param crosses whether there is a second stage
  StagedOp(ReduceOp op, DType dtype, std::size_t device_count, bool crosses);

  /// result = the first stage over `sources`, on that stream.
  void first(Stream& stream, std::span<const void* const> sources, const BufferView& result) const;
  /// Whether the first stage leaves a single source unchanged.
  [[nodiscard]] bool skips_first() const noexcept { return first_ != ReduceOp::mean; }
  [[nodiscard]] ReduceOp between() const noexcept { return op_ == ReduceOp::mean ? ReduceOp::sum : op_; }
  /// result = the last stage over what the second stage left at `from`. Both may be the same memory.
  void last(Stream& stream, const void* from, const BufferView& result) const;

 private:
  ReduceOp op_;
  ReduceOp first_;
  std::size_t device_count_;
};

}  // namespace paceline::internal

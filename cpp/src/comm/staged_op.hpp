// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

/// A reduction over all devices, taken apart: first inside each memory space, then between spaces, then what is left.
///
/// Only a mean has more than one way: floating-point elements are divided inside, which costs no pass of its own and
/// keeps half types from overflowing on their way; integers once the sum is whole, as they must be.
class StagedOp {
 public:
  /// `crosses`: there is a second stage.
  StagedOp(ReduceOp op, DType dtype, std::size_t device_count, bool crosses);

  /// result = the first stage of these, on that stream.
  void first(Stream& stream, std::span<const void* const> sources, const BufferView& result) const;
  /// Whether the first stage of a single source is that source.
  [[nodiscard]] bool skips_first() const noexcept { return first_ != ReduceOp::mean; }
  [[nodiscard]] ReduceOp between() const noexcept { return op_ == ReduceOp::mean ? ReduceOp::sum : op_; }
  /// result = what the second stage has left at `from`, which may be the same place.
  void last(Stream& stream, const void* from, const BufferView& result) const;

 private:
  ReduceOp op_;
  ReduceOp first_;
  std::size_t device_count_;
};

}  // namespace paceline::internal

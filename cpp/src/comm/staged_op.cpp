// SPDX-License-Identifier: Apache-2.0
#include "comm/staged_op.hpp"

namespace paceline::internal {
namespace {

void copy(Stream& stream, const void* from, const BufferView& to) {
  if (to.data != from) stream.copy(to.data, from, to.count * size_of(to.dtype));
}

}  // namespace

StagedOp::StagedOp(ReduceOp op, DType dtype, std::size_t device_count, bool crosses)
    : op_(op), first_(op), device_count_(device_count) {
  const bool integers = dtype == DType::int32 || dtype == DType::int64;
  if (crosses && integers) first_ = between();
}

void StagedOp::first(Stream& stream, std::span<const void* const> sources, const BufferView& result) const {
  if (sources.size() == 1 && skips_first()) return copy(stream, sources.front(), result);
  stream.reduce({sources, result.data, result.count, result.dtype, 1.0, first_, device_count_});
}

void StagedOp::last(Stream& stream, const void* from, const BufferView& result) const {
  if (op_ == first_) return copy(stream, from, result);
  stream.reduce({{&from, 1}, result.data, result.count, result.dtype, 1.0, op_, device_count_});
}

}  // namespace paceline::internal

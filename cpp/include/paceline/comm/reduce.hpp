// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/reduce_op.hpp>

namespace paceline {

/// output[i] = op over k of inputs[k][i], i < count, in one pass. All elements are of type `dtype`.
///
/// sum, mean: added in the order of `inputs`, float16 and bfloat16 in float32 and rounded once at the end, to nearest
///   even. Integer sums wrap around. mean is that sum divided by the number of inputs; for integers truncated towards
///   zero (and of the wrapped sum, where it overflowed).
/// min, max: a NaN among the inputs of an element makes it NaN. Of equal values (0 and -0) the first is kept.
///
/// The result is the same whoever reduces which block, and on every processor, to the bit (for NaNs: that it is one).
/// `output` may be one of the inputs (whole), else it must not overlap any. No alignment is needed. Any thread.
PACELINE_API void reduce_block(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                               ReduceOp op) noexcept;

/// The instruction set that reduce_block uses on this processor: "avx512", "avx2" or "baseline".
[[nodiscard]] PACELINE_API const char* reduce_isa() noexcept;

}  // namespace paceline

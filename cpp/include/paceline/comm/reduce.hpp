// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/reduce_op.hpp>

namespace paceline {

/// output[i] = op over k of inputs[k][i], i < count, in one pass. All elements are of type `dtype`. ReduceOp defines
/// the arithmetic.
///
/// The bits of the result are the same on every processor and for every division into blocks. Only the bits of a NaN
/// may differ. `output` is one of the inputs (whole) or overlaps none of them. No alignment is needed. Any thread.
PACELINE_API void reduce_block(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                               ReduceOp op) noexcept;

/// output[i] = scale * sum over k of inputs[k][i], i < count; without inputs it stays as it was. The output is one of
/// the inputs or overlaps none of them.
struct ReductionSegment {
  std::vector<const void*> inputs{};
  void* output = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
  double scale = 1.0;  ///< other than 1 for float32 and float64 only
};

/// The instruction set that reduce_block uses on this processor: "avx512", "avx2" or "baseline".
[[nodiscard]] PACELINE_API const char* reduce_isa() noexcept;

}  // namespace paceline

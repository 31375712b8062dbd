// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/export.hpp>

namespace paceline {

/// The arithmetic of reductions, on the host (reduce_block) and on devices (DeviceReduction). Inputs are taken in their
/// order.
///
/// sum: float16 and bfloat16 are added in float32 and rounded once at the end, to nearest even. Integers wrap around.
/// mean: the sum divided by the number of inputs, before that rounding. For integers the wrapped sum is divided, and
/// the
///   quotient truncated towards zero.
/// min, max: if an input of an element is NaN, the result is NaN. Of equal values (0 and -0) the first is kept.
enum class ReduceOp : std::uint8_t { sum, mean, min, max };

/// "sum"; "unknown" for a value that is no ReduceOp.
[[nodiscard]] PACELINE_API const char* name_of(ReduceOp op) noexcept;

}  // namespace paceline

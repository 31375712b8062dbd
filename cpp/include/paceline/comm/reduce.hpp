// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/export.hpp>

namespace paceline {

enum class ReduceOp : std::uint8_t { sum, mean, min, max };

/// output[i] = op over k of inputs[k][i], i < count, in one pass. All elements are of type `dtype`.
///
/// Sums run in the order of `inputs`, half types in float32 rounded once at the end, so the result does not depend on who reduces which block.
/// `output` may be one of the inputs (whole), else it must not overlap any. Alignment: that of the element.
PACELINE_API void reduce_block(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                               ReduceOp op) noexcept;

}  // namespace paceline

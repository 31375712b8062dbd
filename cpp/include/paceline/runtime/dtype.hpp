// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <paceline/export.hpp>

namespace paceline {

enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int32, int64 };

/// Bytes of one element; 0 for a value that is no DType.
[[nodiscard]] PACELINE_API std::size_t size_of(DType dtype) noexcept;
/// "float32"; "unknown" for a value that is no DType.
[[nodiscard]] PACELINE_API const char* name_of(DType dtype) noexcept;

}  // namespace paceline

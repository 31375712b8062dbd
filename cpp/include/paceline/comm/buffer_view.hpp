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

/// A contiguous run of elements somewhere in a memory space. Does not own; the caller keeps it alive.
/// `data` may have any alignment, and may be null when `count` is 0.
struct BufferView {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
};

}  // namespace paceline

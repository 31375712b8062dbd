// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/export.hpp>

namespace paceline {

enum class ReduceOp : std::uint8_t { sum, mean, min, max };

/// "sum"; "unknown" for a value that is no ReduceOp.
[[nodiscard]] PACELINE_API const char* name_of(ReduceOp op) noexcept;

}  // namespace paceline

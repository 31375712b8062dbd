// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/runtime/dtype.hpp>

namespace paceline {

/// The DType of `float` and of `double`.
template <class T>
inline constexpr DType kDTypeOf = sizeof(T) == 4 ? DType::float32 : DType::float64;

}  // namespace paceline

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <paceline/runtime/dtype.hpp>

namespace paceline {

/// A contiguous run of elements somewhere in a memory space. Does not own; the caller keeps it alive.
/// `data` may have any alignment, and may be null when `count` is 0.
struct BufferView {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
};

}  // namespace paceline

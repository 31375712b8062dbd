// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <paceline/runtime/dtype.hpp>
#include <paceline/runtime/native_stream.hpp>

namespace paceline {

/// A contiguous run of elements somewhere in a memory space. Does not own; the caller keeps it alive.
/// `data` may have any alignment, and may be null when `count` is 0.
///
/// Memory of a GPU comes with the stream (cudaStream_t) in whose order it is used: what is enqueued there before a call
/// comes before it, what is enqueued there afterwards after it. Null is the GPU's legacy default stream, which is also
/// PyTorch's default. Memory of the host has none.
struct BufferView {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::float32;
  NativeStream stream = nullptr;
};

}  // namespace paceline

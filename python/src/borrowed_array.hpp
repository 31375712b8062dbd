// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include <paceline/comm/buffer_view.hpp>

#include "dlpack.hpp"

namespace paceline::python {

enum class Access { read, write };

/// The memory of a Python array, borrowed without copying for as long as this object lives.
///
/// Takes anything with `__dlpack__` in memory of the CPU, else anything with the buffer protocol. Make and destroy it
/// while holding the GIL; view() may be used without.
class BorrowedArray {
 public:
  /// `label` is what messages call the argument: "all_reduce: buffers[1]".
  /// @throws InvalidArgument if it is no array, not contiguous, read-only (for Access::write), of a type that
  /// collectives do not know, on another device, or part of an autograd graph.
  BorrowedArray(pybind11::handle object, const std::string& label, Access access);
  ~BorrowedArray() { release(); }
  BorrowedArray(BorrowedArray&& other) noexcept;
  BorrowedArray& operator=(BorrowedArray&&) = delete;

  [[nodiscard]] const BufferView& view() const noexcept { return view_; }

 private:
  void take_dlpack(pybind11::handle object, const std::string& label, Access access);
  void take_buffer(pybind11::handle object, const std::string& label, Access access);
  void release() noexcept;

  BufferView view_;
  // Exactly one of these lends the memory.
  dlpack::ManagedTensor* managed_ = nullptr;
  dlpack::ManagedTensorVersioned* versioned_ = nullptr;
  Py_buffer buffer_{};  // buffer_.obj is null when not in use
};

}  // namespace paceline::python

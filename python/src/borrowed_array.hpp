// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/device.hpp>

#include "dlpack.hpp"

namespace paceline::python {

enum class Access { read, write };

/// The memory of a Python array, borrowed without copying for as long as this object lives.
///
/// Takes anything that speaks DLPack, by the C exchange API where its type has it, else by `__dlpack__`; for host
/// devices else anything with the buffer protocol. Make and destroy it while holding the GIL; view() may be used
/// without.
class BorrowedArray {
 public:
  /// `label` is what messages call the argument: "all_reduce: buffers[1]". `device` is whose memory it has to be.
  /// @throws InvalidArgument if it is no array, not contiguous, read-only (for Access::write), of a type that
  /// collectives do not know, on another device, or part of an autograd graph.
  BorrowedArray(pybind11::handle object, const std::string& label, Access access, const Device& device);
  ~BorrowedArray() { release(); }
  BorrowedArray(BorrowedArray&& other) noexcept;
  BorrowedArray& operator=(BorrowedArray&&) = delete;

  /// On a GPU with the producer's current stream, where that is known.
  [[nodiscard]] const BufferView& view() const noexcept { return view_; }
  /// The producer's stream is not known: it was made to wait for nothing, so the result has to be waited for.
  [[nodiscard]] bool stream_unknown() const noexcept { return stream_unknown_; }

 private:
  void take_dlpack(pybind11::handle object, const std::string& label, Access access, const Device& device);
  const dlpack::ExchangeApi* take_from_exchange_api(pybind11::handle object, const std::string& label);
  void take_capsule(pybind11::handle object, const std::string& label, const Device& device);
  void take_buffer(pybind11::handle object, const std::string& label, Access access);
  void release() noexcept;

  BufferView view_;
  bool stream_unknown_ = false;
  // Exactly one of these lends the memory.
  dlpack::ManagedTensor* managed_ = nullptr;
  dlpack::ManagedTensorVersioned* versioned_ = nullptr;
  Py_buffer buffer_{};  // buffer_.obj is null when not in use
};

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/device.hpp>

#include "dlpack.hpp"

namespace paceline::python {

enum class Access { read, write };

/// The memory of a Python array, borrowed without copying for as long as this object lives.
///
/// Accepts anything that speaks DLPack, through the C exchange API or `__dlpack__`. For host devices it also accepts
/// the buffer protocol. Construct and destroy it with the GIL held; view() needs no GIL.
class BorrowedArray {
 public:
  /// `label` names the argument in messages: "all_reduce: buffers[1]". `device` must own the memory.
  /// @throws InvalidArgument if `object` is not an array, not contiguous, read-only (for Access::write), of a type that
  /// collectives do not support, on another device, or part of an autograd graph.
  BorrowedArray(pybind11::handle object, const std::string& label, Access access, const Device& device);

  /// On a GPU, includes the producer's current stream if it is known.
  [[nodiscard]] const BufferView& view() const noexcept { return view_; }
  /// True if the producer's stream is unknown. The stream then waits for nothing, so the caller must wait for the
  /// result.
  [[nodiscard]] bool stream_unknown() const noexcept { return stream_unknown_; }

 private:
  void take_dlpack(pybind11::handle object, const std::string& label, Access access, const Device& device);
  const dlpack::ExchangeApi* take_from_exchange_api(pybind11::handle object, const std::string& label);
  void take_capsule(pybind11::handle object, const std::string& label, const Device& device);
  void take_buffer(pybind11::handle object, const std::string& label, Access access);

  struct ReleaseBuffer {
    void operator()(Py_buffer* buffer) const {
      PyBuffer_Release(buffer);
      delete buffer;
    }
  };

  BufferView view_;
  bool stream_unknown_ = false;
  // Exactly one of these three owns the memory.
  dlpack::Owner<dlpack::ManagedTensor> managed_;
  dlpack::Owner<dlpack::ManagedTensorVersioned> versioned_;
  std::unique_ptr<Py_buffer, ReleaseBuffer> buffer_;
};

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "dlpack.hpp"

namespace paceline::python {

/// What a step asks of hundreds of small tensors, each time: where they lie, and copies of them. Python would take a
/// microsecond for each. DLPack's C exchange API says where a tensor lies in a tenth of that.
///
/// Only tensors of exactly the type that this was made for are read: a subclass may mean something else by its memory.
class TensorMemory {
 public:
  /// `type`: torch.Tensor. Where it has no exchange API, everything is left to PyTorch.
  explicit TensorMemory(pybind11::type type);

  /// Copies buffers, given by (dictionary, other dictionary, name in both), from the first dictionary to the second.
  ///
  /// Returns what was written, and the entries that are left to PyTorch: what does not lie alike in plain memory of the
  /// host, or is large, since Python's lock stays held here. Versions of what was written are not counted.
  [[nodiscard]] pybind11::tuple copy(const pybind11::list& entries) const;

  /// Whether no parameter has a gradient.
  [[nodiscard]] bool without_gradients(const pybind11::list& parameters) const;
  /// Whether each parameter has a gradient, and these are dense and share no memory.
  [[nodiscard]] bool apart(const pybind11::list& parameters) const;

 private:
  /// Whether the tensor could be read.
  bool read(PyObject* tensor, dlpack::Tensor& found) const;
  /// Whether one is to be copied to the other here, and could be.
  bool copied(PyObject* from, PyObject* to) const;

  pybind11::type type_;
  pybind11::str gradient_;
  pybind11::str shares_;  // what tensors have that stand for the memory of others (buffers.py)
  int (*read_)(void* object, dlpack::Tensor* tensor) = nullptr;
};

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "tensor_memory.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace paceline::python {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // takes 0.1 ms to copy

py::str interned(const char* name) { return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name)); }

std::size_t bytes_of(const dlpack::Tensor& tensor) {
  return static_cast<std::size_t>(dlpack::count_of(tensor)) * tensor.dtype.bits * tensor.dtype.lanes / 8;
}

char* begin_of(const dlpack::Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

bool lie_alike(const dlpack::Tensor& one, const dlpack::Tensor& other) {
  return one.dtype.code == other.dtype.code && one.dtype.bits == other.dtype.bits &&
         one.dtype.lanes == other.dtype.lanes && one.dimension_count == other.dimension_count &&
         std::equal(one.shape, one.shape + one.dimension_count, other.shape);
}

}  // namespace

TensorMemory::TensorMemory(py::type type)
    : type_(std::move(type)), gradient_(interned("grad")), shares_(interned("_paceline_shares")) {
  const dlpack::ExchangeApi* const api = dlpack::exchange_api_of(type_);
  if (api != nullptr) read_ = api->tensor_from_object;
}

bool TensorMemory::read(PyObject* tensor, dlpack::Tensor& found) const {
  if (read_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != type_.ptr()) return false;
  if (read_(tensor, &found) == 0) return true;
  PyErr_Clear();  // a sparse tensor, for example
  return false;
}

bool TensorMemory::copied(PyObject* from, PyObject* to) const {
  if (from == to) return true;
  dlpack::Tensor source;
  dlpack::Tensor target;
  if (!read(from, source) || !read(to, target)) return false;
  for (const dlpack::Tensor* const one : {&source, &target}) {
    if (one->device.type != dlpack::kCpu || one->dtype.code == dlpack::kComplex || !dlpack::is_contiguous(*one))
      return false;
  }
  const std::size_t bytes = bytes_of(source);
  if (!lie_alike(source, target) || bytes > kMostBytes || (bytes > 0 && (!source.data || !target.data))) return false;
  if (PyObject_HasAttr(from, shares_.ptr()) != 0 || PyObject_HasAttr(to, shares_.ptr()) != 0) return false;
  if (bytes > 0) std::memmove(begin_of(target), begin_of(source), bytes);
  return true;
}

py::tuple TensorMemory::copy(const py::list& entries) const {
  py::list written;
  py::list left;
  for (const py::handle entry : entries) {
    PyObject* const name = PyTuple_GetItem(entry.ptr(), 2);
    if (name == nullptr) throw py::error_already_set();
    PyObject* const from = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry.ptr(), 0), name);
    PyObject* const to = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry.ptr(), 1), name);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (from == nullptr || to == nullptr || !copied(from, to)) {
      left.append(entry);
    } else if (from != to) {
      written.append(py::handle(to));
    }
  }
  return py::make_tuple(written, left);
}

bool TensorMemory::without_gradients(const py::list& parameters) const {
  return std::all_of(parameters.begin(), parameters.end(),
                     [&](const py::handle parameter) { return parameter.attr(gradient_).is_none(); });
}

bool TensorMemory::apart(const py::list& parameters) const {
  std::vector<std::pair<const char*, const char*>> spans;
  spans.reserve(parameters.size());
  for (const py::handle parameter : parameters) {
    const py::object gradient = parameter.attr(gradient_);
    dlpack::Tensor found;
    if (!read(gradient.ptr(), found) || !dlpack::is_contiguous(found)) return false;
    const char* const begin = begin_of(found);
    spans.emplace_back(begin, begin + bytes_of(found));
  }
  std::sort(spans.begin(), spans.end());
  return std::adjacent_find(spans.begin(), spans.end(),
                            [](const auto& one, const auto& next) { return next.first < one.second; }) == spans.end();
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "python_program.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "garbage_collection.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

// Runs `call` with the GIL held. CPython up to 3.13 ends a thread that asks for the GIL during shutdown by unwinding
// its stack. No C++ frame may swallow or stop the unwinding, so such a thread sleeps here until the process ends.
template <class Call>
auto with_interpreter(Call call) {
  try {
    const WorkerGil gil;
    return call();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

[[noreturn]] void fail() {
  PyErr_Clear();
  throw BodyFailed();
}

BufferView view_of(PyObject* entry) {
  if (entry == Py_None) return {};
  const py::tuple fields = py::reinterpret_borrow<py::tuple>(entry);
  return {.data = reinterpret_cast<void*>(fields[0].cast<std::uintptr_t>()),
          .count = fields[1].cast<std::size_t>(),
          .dtype = static_cast<DType>(fields[2].cast<int>())};
}

/// Converts the list that a callable returned, and takes ownership of it.
std::vector<BufferView> views_of(PyObject* result) {
  if (result == nullptr) fail();
  const py::object owned = py::reinterpret_steal<py::object>(result);
  if (owned.is_none()) fail();
  const Py_ssize_t count = PyList_Size(result);
  if (count < 0) fail();
  std::vector<BufferView> views;
  views.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) views.push_back(view_of(PyList_GET_ITEM(result, i)));
  return views;
}

}  // namespace

PythonProgram::PythonProgram(py::object run, py::object finish, std::size_t device_count)
    : run_(std::move(run)), finish_(std::move(finish)), devices_(device_count) {}

PythonProgram::~PythonProgram() {
  // Only an abandoned step still has its callables here, on any thread.
  drop(run_);
  drop(finish_);
}

void PythonProgram::release() {
  run_ = py::object();
  finish_ = py::object();
}

bool PythonProgram::run(const MicroBatch& micro_batch) {
  return with_interpreter([&] {
    // Plain pointers, because the interpreter may end inside the call, and the unwinding must not touch reference
    // counts.
    PyObject* arguments[] = {PyLong_FromSize_t(micro_batch.device), PyLong_FromLongLong(micro_batch.begin),
                             PyLong_FromLongLong(micro_batch.end),
                             PyLong_FromLong((micro_batch.continues ? 1 : 0) | (micro_batch.measure ? 2 : 0))};
    PyObject* result = nullptr;
    if (std::find(std::begin(arguments), std::end(arguments), nullptr) == std::end(arguments)) {
      pause_collection();
      result = PyObject_Vectorcall(run_.ptr(), arguments, 4, nullptr);
      resume_collection();
    }
    for (PyObject* const argument : arguments) Py_XDECREF(argument);
    if (result == nullptr) fail();
    PyObject* code_object = result;
    std::int64_t& bytes = devices_[micro_batch.device].memory_bytes;
    bytes = 0;
    if (PyTuple_Check(result) != 0 && PyTuple_GET_SIZE(result) == 2) {
      code_object = PyTuple_GET_ITEM(result, 0);
      bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(result, 1));
    }
    const long code = PyLong_AsLong(code_object);
    Py_DECREF(result);
    if (code < 0 || PyErr_Occurred() != nullptr) fail();
    return code == 1;
  });
}

std::optional<std::int64_t> PythonProgram::memory_bytes(DeviceId device) {
  const std::int64_t bytes = devices_[device].memory_bytes;
  return bytes < 0 ? std::nullopt : std::optional(bytes);
}

void PythonProgram::finish(DeviceId device) {
  with_interpreter([&] {
    PyObject* result = PyObject_CallFunction(finish_.ptr(), "n", static_cast<Py_ssize_t>(device));
    devices_[device].gradients = views_of(result);
    return 0;
  });
}

std::vector<BufferView> views_from(const py::object& callable) {
  return with_interpreter([&] { return views_of(PyObject_CallNoArgs(callable.ptr())); });
}

std::vector<ReductionSegment> PythonProgram::reduction() {
  std::vector<ReductionSegment> segments;
  std::size_t parameter_count = 0;
  for (const DeviceState& one : devices_) parameter_count = std::max(parameter_count, one.gradients.size());
  for (std::size_t p = 0; p < parameter_count; ++p) {
    ReductionSegment segment;
    for (const auto& [views, bytes] : devices_) {
      if (p >= views.size() || views[p].data == nullptr) continue;
      segment.count = views[p].count;
      segment.dtype = views[p].dtype;
      segment.inputs.push_back(views[p].data);
    }
    if (segment.inputs.size() < 2) continue;  // a single gradient is the sum
    segment.output = const_cast<void*>(segment.inputs.front());
    segments.push_back(std::move(segment));
  }
  return segments;
}

}  // namespace paceline::python

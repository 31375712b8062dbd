// SPDX-License-Identifier: Apache-2.0
#include "python_program.hpp"

#include <algorithm>
#include <utility>

#include "garbage_collection.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

/// Python's current error of the calling thread, with its traceback, which is no error of the thread any more.
PyObject* taken_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject* type = nullptr;
  PyObject* error = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(error, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return error;
#endif
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
  if (result == nullptr) throw BodyFailed();
  const py::object owned = py::reinterpret_steal<py::object>(result);
  if (owned.is_none()) throw BodyFailed();
  const Py_ssize_t count = PyList_Size(result);
  if (count < 0) throw BodyFailed();
  std::vector<BufferView> views;
  views.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) views.push_back(view_of(PyList_GET_ITEM(result, i)));
  return views;
}

}  // namespace

BodyFailed::BodyFailed() : cause_(shared(py::reinterpret_steal<py::object>(taken_error()))) {}

py::object BodyFailed::take_cause() const { return *cause_ ? std::move(*cause_) : py::object(py::none()); }

py::object take_cause(const std::exception_ptr& error) {
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const BodyFailed& failed) {
    return failed.take_cause();
  } catch (...) {
    return py::none();
  }
}

PyObject* call_body(const py::object& body, std::initializer_list<std::int64_t> numbers) {
  std::vector<PyObject*> arguments(numbers.size());
  std::ranges::transform(numbers, arguments.begin(), PyLong_FromLongLong);
  PyObject* result = nullptr;
  if (std::ranges::find(arguments, nullptr) == arguments.end()) {
    pause_collection();
    result = PyObject_Vectorcall(body.ptr(), arguments.data(), arguments.size(), nullptr);
    resume_collection();
  }
  for (PyObject* const argument : arguments) Py_XDECREF(argument);
  if (result == nullptr) throw BodyFailed();
  return result;
}

PythonProgram::PythonProgram(py::object run, py::object finish, std::span<const DeviceId> devices)
    : devices_(devices), run_(std::move(run)), finish_(std::move(finish)) {}

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
    PyObject* const result =
        call_body(run_, {static_cast<std::int64_t>(micro_batch.device.number()), micro_batch.begin, micro_batch.end,
                         (micro_batch.continues ? 1 : 0) | (micro_batch.measure ? 2 : 0) | (micro_batch.last ? 4 : 0)});
    PyObject* code_object = result;
    std::int64_t& bytes = devices_[micro_batch.device].memory_bytes;
    bytes = 0;
    if (PyTuple_Check(result) != 0 && PyTuple_GET_SIZE(result) >= 2) {
      code_object = PyTuple_GET_ITEM(result, 0);
      bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(result, 1));
      if (PyTuple_GET_SIZE(result) == 3) {
        devices_[micro_batch.device].waited_seconds = PyFloat_AsDouble(PyTuple_GET_ITEM(result, 2));
      }
    }
    const long code = PyLong_AsLong(code_object);
    Py_DECREF(result);
    if (code < 0 || PyErr_Occurred() != nullptr) throw BodyFailed();
    return code == 1;
  });
}

std::optional<std::int64_t> PythonProgram::memory_bytes(DeviceId device) {
  const std::int64_t bytes = devices_[device].memory_bytes;
  return bytes < 0 ? std::nullopt : std::optional(bytes);
}

void PythonProgram::finish(DeviceId device) {
  with_interpreter([&] {
    PyObject* result = PyObject_CallFunction(finish_.ptr(), "n", static_cast<Py_ssize_t>(device.number()));
    devices_[device].gradients = views_of(result);
    return 0;
  });
}

void PythonProgram::stamp(std::vector<ClaimRecord>& claims) const {
  for (ClaimRecord& claim : claims) claim.finish_seconds -= devices_[claim.micro_batch.device].waited_seconds;
}

std::vector<ReductionSegment> PythonProgram::reduction() {
  std::vector<ReductionSegment> segments;
  std::size_t parameter_count = 0;
  for (const auto& [id, one] : devices_) parameter_count = std::max(parameter_count, one.gradients.size());
  for (std::size_t p = 0; p < parameter_count; ++p) {
    ReductionSegment segment;
    for (const auto& [id, one] : devices_) {
      const std::vector<BufferView>& views = one.gradients;
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

QueuedProgram::QueuedProgram(py::object run, py::object finish, const py::object& outputs,
                             std::shared_ptr<TrainerQueues> queues)
    : PythonProgram(std::move(run), std::move(finish), queues->devices()),
      outputs_(outputs.is_none() ? std::vector<BufferView>() : views_of(outputs.inc_ref().ptr())),
      queues_(std::move(queues)) {}

void QueuedProgram::begin(const Step& step) {
  times_ = queues_->begin_step(queues_->copies, step.takes_part());
  queues_->expect(outputs_, 1.0);
}

void QueuedProgram::release() {
  PythonProgram::release();
  queues_.reset();  // a step may outlive its trainer
}

bool QueuedProgram::run(const MicroBatch& micro_batch) {
  const DeviceId d = micro_batch.device;
  queues_->enter(d, !queues_->in_buckets);
  const bool dry = queues_->begin_run(d, micro_batch.continues);
  const bool first = PythonProgram::run(micro_batch);
  queues_->end_run(d);
  devices_[d].ran = true;
  return first || dry;
}

void QueuedProgram::finish(DeviceId d) {
  if (!devices_[d].ran) return;
  PythonProgram::finish(d);
  queues_->deliver(d, devices_[d].gradients);
}

std::vector<ReductionSegment> QueuedProgram::reduction() {
  queues_->reduce();
  queues_->end_step();
  return {};
}

}  // namespace paceline::python

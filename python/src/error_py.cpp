// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <paceline/error.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

// Python types of the library's errors. Each also derives from the built-in that a user would catch. Never freed,
// because the translator may run during interpreter shutdown.
struct ErrorTypes {
  PyObject* error = nullptr;
  PyObject* invalid_argument = nullptr;
  PyObject* unavailable = nullptr;
  PyObject* timeout = nullptr;
  PyObject* cancelled = nullptr;
  PyObject* out_of_memory = nullptr;
  PyObject* device_lost = nullptr;
};
ErrorTypes types;

PyObject* make(py::module_& module, const char* name, const char* doc, py::tuple bases) {
  const std::string qualified = std::string("paceline.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_borrow<py::object>(type));
  return type;
}

void raise(PyObject* type, const Error& error) {
  py::object exception = py::reinterpret_borrow<py::object>(type)(error.what());
  exception.attr("device") = error.device().empty() ? py::object(py::none()) : py::object(py::str(error.device()));
  PyErr_SetObject(type, exception.ptr());
}

}  // namespace

void bind_errors(py::module_& module) {
  const auto with = [&](PyObject* builtin) {
    return py::make_tuple(py::reinterpret_borrow<py::object>(types.error), py::reinterpret_borrow<py::object>(builtin));
  };
  types.error = make(module, "Error", "Base of the errors that paceline raises; `device` names the device or is None.",
                     py::make_tuple(py::reinterpret_borrow<py::object>(PyExc_Exception)));
  types.invalid_argument =
      make(module, "InvalidArgument", "An argument cannot be used; nothing was changed.", with(PyExc_ValueError));
  types.unavailable = make(module, "Unavailable", "This machine or build does not have it.", with(PyExc_RuntimeError));
  types.timeout = make(module, "Timeout", "A deadline passed.", with(PyExc_TimeoutError));
  types.cancelled = make(module, "Cancelled", "Given up because something else failed or the group is closing.",
                         with(PyExc_RuntimeError));
  types.out_of_memory = make(module, "OutOfMemory", "No memory left for what was asked.", with(PyExc_MemoryError));
  types.device_lost =
      make(module, "DeviceLost", "A device that only a new process can use again: save what you need and start anew.",
           with(PyExc_RuntimeError));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const InvalidArgument& error) {
      raise(types.invalid_argument, error);
    } catch (const Unavailable& error) {
      raise(types.unavailable, error);
    } catch (const Timeout& error) {
      raise(types.timeout, error);
    } catch (const Cancelled& error) {
      raise(types.cancelled, error);
    } catch (const OutOfMemory& error) {
      raise(types.out_of_memory, error);
    } catch (const DeviceLost& error) {
      raise(types.device_lost, error);
    } catch (const Error& error) {
      raise(types.error, error);
    }
  });
}

}  // namespace paceline::python

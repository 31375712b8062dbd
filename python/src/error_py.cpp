// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <vector>

#include <paceline/error.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

struct PythonType {
  bool (*is)(const Error* error);
  PyObject* type;
};

// The Python types of the library's errors, derived types first. Never freed, because the translator may run during
// interpreter shutdown.
std::vector<PythonType>& types() {
  static auto* const all = new std::vector<PythonType>;
  return *all;
}

/// Adds the type for E. Its first base is paceline.Error, its other base the built-in that a user would catch.
template <class E>
void bind_error(py::module_& module, const char* name, const char* doc, PyObject* builtin) {
  py::list bases;
  if (!types().empty()) bases.append(py::handle(types().back().type));
  bases.append(py::handle(builtin));
  PyObject* const type =
      PyErr_NewExceptionWithDoc((std::string("paceline.") + name).c_str(), doc, py::tuple(bases).ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, py::reinterpret_borrow<py::object>(type));
  types().insert(types().begin(), {[](const Error* error) { return dynamic_cast<const E*>(error) != nullptr; }, type});
}

void raise(const Error& error) {
  const auto found = std::find_if(types().begin(), types().end(), [&](const auto& one) { return one.is(&error); });
  py::object exception = py::reinterpret_borrow<py::object>(found->type)(error.what());
  exception.attr("device") = error.device().empty() ? py::object(py::none()) : py::object(py::str(error.device()));
  PyErr_SetObject(found->type, exception.ptr());
}

}  // namespace

void bind_errors(py::module_& module) {
  bind_error<Error>(module, "Error", "Base of the errors that paceline raises; `device` names the device or is None.",
                    PyExc_Exception);
  bind_error<InvalidArgument>(module, "InvalidArgument", "An argument cannot be used; nothing was changed.",
                              PyExc_ValueError);
  bind_error<Unavailable>(module, "Unavailable", "This machine or build does not have it.", PyExc_RuntimeError);
  bind_error<Timeout>(module, "Timeout", "A deadline passed.", PyExc_TimeoutError);
  bind_error<Cancelled>(module, "Cancelled", "Given up because something else failed or the group is closing.",
                        PyExc_RuntimeError);
  bind_error<Rejected>(module, "Rejected", "A job that a pool did not take.", PyExc_RuntimeError);
  bind_error<Expired>(module, "Expired", "A job that waited until it could no longer end by its deadline.",
                      PyExc_TimeoutError);
  bind_error<OutOfMemory>(module, "OutOfMemory", "No memory left for what was asked.", PyExc_MemoryError);
  bind_error<DeviceLost>(module, "DeviceLost",
                         "A device that only a new process can use again: save what you need and start anew.",
                         PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace paceline::python

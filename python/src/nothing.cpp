// SPDX-License-Identifier: Apache-2.0
#include "nothing.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

PyObject* enter(PyObject* /*self*/, PyObject* /*none*/) { Py_RETURN_NONE; }
PyObject* leave(PyObject* /*self*/, PyObject* const* /*exception*/, Py_ssize_t /*count*/) { Py_RETURN_NONE; }

PyMethodDef methods[] = {{"__enter__", &enter, METH_NOARGS, "__enter__(self) -> None\n"},
                         {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&leave)),
                          METH_FASTCALL, "__exit__(self, *args) -> None\n"},
                         {nullptr, nullptr, 0, nullptr}};
char documentation[] = "A context manager that does nothing.";
PyType_Slot slots[] = {{Py_tp_methods, methods}, {Py_tp_doc, documentation}, {0, nullptr}};
PyType_Spec spec = {"paceline._core.engine.Nothing", static_cast<int>(sizeof(PyObject)), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

py::object nothing_type() {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(type);
}

}  // namespace paceline::python

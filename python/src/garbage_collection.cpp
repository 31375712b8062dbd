// SPDX-License-Identifier: Apache-2.0
#include "garbage_collection.hpp"

#include <Python.h>

#include <cstddef>

namespace paceline::python {

#if PY_VERSION_HEX < 0x030C0000

namespace {

std::size_t inside = 0;  // workers
bool was_enabled = false;

}  // namespace

void pause_collection() {
  if (inside++ == 0) was_enabled = PyGC_Disable() != 0;
}

void resume_collection() {
  collect_if_due();  // still counted: a collection lets go of the interpreter, and others come and leave meanwhile
  if (--inside == 0 && was_enabled) PyGC_Enable();
}

void collect_if_due() {
  if (inside == 0 || !was_enabled) return;
  PyGC_Enable();
  Py_XDECREF(PySet_New(nullptr));  // Python looks whether it is time when an object is made
  PyGC_Disable();
}

#else

void pause_collection() {}
void resume_collection() {}
void collect_if_due() {}

#endif

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "garbage_collection.hpp"

#include <Python.h>

#include <cstddef>

namespace paceline::python {

#if PY_VERSION_HEX < 0x030C0000

namespace {

std::size_t inside = 0;  // number of workers in user code
bool was_enabled = false;

}  // namespace

void pause_collection() {
  if (inside++ == 0) was_enabled = PyGC_Disable() != 0;
}

void resume_collection() {
  collect_if_due();  // before the count goes down: a collection may release the GIL, and other workers then enter and
                     // leave
  if (--inside == 0 && was_enabled) PyGC_Enable();
}

void collect_if_due() {
  if (inside == 0 || !was_enabled) return;
  PyGC_Enable();
  Py_XDECREF(PySet_New(nullptr));  // creating an object lets Python collect if a collection is due
  PyGC_Disable();
}

#else

void pause_collection() {}
void resume_collection() {}
void collect_if_due() {}

#endif

}  // namespace paceline::python

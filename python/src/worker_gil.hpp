// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace paceline::python {

/// Holds the interpreter on a worker thread.
///
/// A worker keeps one PyThreadState for its whole life: making one per call costs five times the call itself and would
/// lose what user code keeps in threading.local. It is given back when the thread ends.
class WorkerGil {
 public:
  WorkerGil();
  ~WorkerGil();
  WorkerGil(const WorkerGil&) = delete;
  WorkerGil& operator=(const WorkerGil&) = delete;
};

/// True from the moment on when no thread but the main one may enter Python any more.
bool interpreter_is_ending() noexcept;

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "worker_gil.hpp"

#include <utility>

namespace paceline::python {
namespace {

class ThreadState {
 public:
  ThreadState() : gil_(PyGILState_Ensure()), state_(PyThreadState_Get()) { PyEval_SaveThread(); }
  ~ThreadState() {
    if (interpreter_is_ending()) return;                 // the interpreter frees what is left
    or_sleep([this] { PyEval_RestoreThread(state_); });  // it may begin to end meanwhile
    PyGILState_Release(gil_);
  }
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;

  void enter() { PyEval_RestoreThread(state_); }

 private:
  PyGILState_STATE gil_;
  PyThreadState* state_;
};

ThreadState& this_thread() {
  thread_local ThreadState state;
  return state;
}

}  // namespace

bool interpreter_is_ending() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

bool interrupts(const pybind11::error_already_set& error) {
  if (!error.matches(PyExc_KeyboardInterrupt)) return false;
  try {
    const auto threading = pybind11::module_::import("threading");
    return threading.attr("current_thread")().is(threading.attr("main_thread")());
  } catch (pybind11::error_already_set&) {  // another signal, which only the main thread gets
    return true;
  }
}

void drop(pybind11::object& object) {
  if (!object) return;
  PyObject* const dropped = object.release().ptr();
  if (interpreter_is_ending()) return;
  on_any_thread([dropped] { Py_DECREF(dropped); });
}

std::shared_ptr<pybind11::object> shared(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* one) {
            drop(*one);
            delete one;
          }};
}

std::function<void()> callable_on_any_thread(pybind11::object function) {
  return [kept = shared(std::move(function))] {
    if (interpreter_is_ending()) return;
    on_any_thread([&] {
      try {
        call_python(*kept);
      } catch (pybind11::error_already_set& failed) {
        if (interrupts(failed)) {
          PyErr_SetInterrupt();  // raised where the main thread goes on
        } else {
          failed.discard_as_unraisable("a call of a pool");
        }
      }
    });
  };
}

WorkerGil::WorkerGil() { this_thread().enter(); }
WorkerGil::~WorkerGil() {
  // Once the interpreter is ending, only the main thread holds the GIL. This thread is then being unwound by CPython.
  if (!interpreter_is_ending()) PyEval_SaveThread();
}

}  // namespace paceline::python

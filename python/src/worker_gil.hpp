// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

namespace paceline::python {

/// Holds the GIL on a worker thread.
///
/// A worker keeps one PyThreadState for its whole life. Making one per call costs five times the call itself, and would
/// lose what user code keeps in threading.local. The state is freed when the thread ends.
class WorkerGil {
 public:
  WorkerGil();
  ~WorkerGil();
  WorkerGil(const WorkerGil&) = delete;
  WorkerGil& operator=(const WorkerGil&) = delete;
};

/// Runs `call`, which may ask for the GIL. CPython up to 3.13 ends a thread that does so during shutdown by unwinding
/// its stack. No C++ frame may swallow or stop the unwinding, so such a thread sleeps here until the process ends.
template <class Call>
auto or_sleep(const Call& call) {
  try {
    return call();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

/// Releases the GIL where no signal may end a wait: a BlockingRegion inside of it does not poll.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    or_sleep([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

/// Runs `call` with the GIL held.
template <class Call>
auto with_interpreter(Call call) {
  return or_sleep([&] {
    const WorkerGil gil;
    return call();
  });
}

/// True once only the main thread may enter Python.
bool interpreter_is_ending() noexcept;

/// Runs `call`, which must not throw, with the GIL held, on any thread, with or without the GIL. The interpreter may
/// begin to end meanwhile. The unwinding, see or_sleep(), must leave neither a destructor nor the scope that holds the
/// GIL.
template <class Call>
void on_any_thread(const Call& call) {
  or_sleep([&] {
    const pybind11::gil_scoped_acquire gil;
    or_sleep(call);
  });
}

/// What a Python function returns. A thread that is unwound in it sleeps here, see or_sleep(): the frames above would
/// drop their references without the GIL.
template <class... Arguments>
pybind11::object call_python(const pybind11::object& function, Arguments&&... arguments) {
  const pybind11::tuple all = pybind11::make_tuple(std::forward<Arguments>(arguments)...);
  PyObject* const result = or_sleep([&] { return PyObject_CallObject(function.ptr(), all.ptr()); });
  if (result == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

/// A Python function as a call for any thread. What it raises is told as unraisable.
std::function<void()> callable_on_any_thread(pybind11::object function);

/// Whether a signal handler has raised KeyboardInterrupt on the main thread, perhaps in code that it is not meant for.
bool interrupts(const pybind11::error_already_set& error);

/// Drops a reference on any thread, with or without the GIL. Leaks it if the interpreter is ending.
void drop(pybind11::object& object);

/// The object for several owners, of which the last one drops it.
std::shared_ptr<pybind11::object> shared(pybind11::object object);

}  // namespace paceline::python

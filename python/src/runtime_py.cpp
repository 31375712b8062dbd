// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/host_topology.hpp>

#include "bindings.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

// Every wait of the library releases the GIL, because a worker may need it to finish. This includes waits in
// destructors that the garbage collector runs.
void* release_gil() {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return nullptr;
  return PyEval_SaveThread();
}

// The unwinding during shutdown cannot pass the destructor that calls this function. So a daemon that waits for a step
// sleeps here.
void acquire_gil(void* token) {
  if (token != nullptr) or_sleep([token] { PyEval_RestoreThread(static_cast<PyThreadState*>(token)); });
}

// An exception from a signal handler leaves the wait with the GIL held. Otherwise the GIL is released again.
void check_signals(void* token) {
  acquire_gil(token);
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  PyEval_SaveThread();  // returns the same token
}

// Waits and handles signals, like every wait on the main thread.
void close(DeviceGroup& group, double timeout) {
  bool signalled = false;
  const auto no_signal = [&signalled] {
    signalled = signalled || PyErr_CheckSignals() != 0;
    return !signalled;
  };
  try {
    group.close(timeout_of("close", timeout), no_signal);
  } catch (const Timeout&) {
    if (!signalled) throw;
  }
  if (signalled) throw py::error_already_set();
}

// Ends a `with` block. Does not wait for the workers if an exception leaves the block while they still run (a second
// Ctrl-C).
void leave(DeviceGroup& group, const py::object& kind, const py::args&) {
  if (kind.is_none() || !group.busy()) return close(group, 10.0);
  try {
    group.close(std::chrono::nanoseconds(0));
  } catch (const Timeout&) {
    // The pending exception takes precedence.
  }
}

/// Whether threads of this interpreter take turns. An extension that does not support free threading brings the lock
/// back, so the build alone does not say.
bool has_gil() {
  const py::module_ sys = py::module_::import("sys");
  return !py::hasattr(sys, "_is_gil_enabled") || sys.attr("_is_gil_enabled")().cast<bool>();
}

DeviceGroup make_group(const std::variant<std::string, std::vector<std::variant<std::string, Device>>>& devices,
                       std::optional<bool> one_socket) {
  if (const auto* name = std::get_if<std::string>(&devices)) {
    if (*name == "auto")
      return DeviceGroup::all(DeviceKind::host);  // the Python side computes on host devices by default
    return DeviceGroup(std::vector<Device>{find_device(*name)});
  }
  std::vector<Device> found;
  for (const auto& entry : std::get<1>(devices)) {
    found.push_back(std::holds_alternative<Device>(entry) ? std::get<Device>(entry)
                                                          : find_device(std::get<std::string>(entry)));
  }
  if (one_socket.value_or(has_gil())) found = on_one_socket(std::move(found), read_host_topology());
  return DeviceGroup(std::move(found));
}

std::string group_repr(const DeviceGroup& group) {
  std::string names;
  for (const Device& device : group.devices()) names += (names.empty() ? "" : ", ") + device.name;
  return "<paceline.DeviceGroup [" + names + "]" + (group.closed() ? " closed>" : ">");
}

}  // namespace

std::chrono::nanoseconds nanoseconds_of(double seconds) {
  constexpr double century = 3e9;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, century)));
}

std::chrono::nanoseconds timeout_of(const char* call, double seconds) {
  if (std::isnan(seconds) || seconds < 0.0) {
    throw InvalidArgument(
        fmt::format("{}: timeout is {}; it must be 0 or more seconds, inf to wait for ever", call, seconds));
  }
  return nanoseconds_of(seconds);
}

void bind_runtime(py::module_& module) {
  set_blocking_hooks({.enter = release_gil, .leave = acquire_gil, .poll = check_signals});
  bind_device(module);
  module.def(
      "on_a_worker", [] { return Turn::of_this_thread() != nullptr; },
      "Whether the calling thread runs a piece of work with a device's turn: no step may begin there.");
  // Close groups before interpreter shutdown: workers hold a thread state, and some may wait for the GIL.
  py::module_::import("atexit").attr("register")(py::cpp_function([] { DeviceGroup::close_all(); }));

  py::class_<DeviceGroup>(module, "DeviceGroup",
                          R"(An ordered set of devices, and a seat at the worker thread of each.

There is one worker per device in the process, which all groups with this device share. It lives until the last of them is closed, by
`close()`, the end of a ``with`` block, or the last reference. Workers are pinned to their device's cores and sleep without work. Steps
of different trainers on one device take turns. After ``fork`` (a DataLoader worker) the child process has no workers: there every
call raises `Unavailable`.

Parameters
----------
devices
    ``"auto"`` (all host devices), one name such as ``"host:0"``, or a list of names and `Device` objects. `paceline.devices()` lists them.
one_socket
    Where the workers of GPUs run if the GPUs lie on several processor sockets. True: all on the cores of one socket, that of most of the
    GPUs, and of the first one among equals. Threads that take Python's lock in turn then do so within one socket. False: each on the cores
    next to its GPU. None (default): True if the interpreter has a global lock. A GPU's worker that another group has started stays where it is.

Raises
------
InvalidArgument
    If a device does not exist or is named twice, or if the list is empty.)")
      .def(py::init(&make_group), "devices"_a = "auto", py::kw_only(), "one_socket"_a = py::none())
      .def_property_readonly("devices", &DeviceGroup::devices, "The devices, in order.")
      .def_property_readonly("closed", &DeviceGroup::closed, "True once the group has left its workers.")
      .def_property_readonly("busy", &DeviceGroup::busy,
                             "True while a step or a collective of this group, or of a share of it, has not ended.")
      .def("share", &DeviceGroup::share,
           "Another group of the same devices, which is busy and closed on its own. Closing this group closes it, too.")
      .def("__len__", &DeviceGroup::size)
      .def("__repr__", &group_repr)
      .def("close", &close, "timeout"_a = 10.0,
           R"(Leave the workers, and end those that no other group uses. A second call does nothing.

Raises
------
Timeout
    If a device has not done within `timeout` seconds what this group gave it. The error names it. What no worker has begun is cancelled.
    A worker whose user code does not return is left behind.
InvalidArgument
    If `timeout` is negative or NaN.)")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", &leave);
}

}  // namespace paceline::python

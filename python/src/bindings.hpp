// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <string>

#include <paceline/comm/communicator.hpp>

namespace paceline::python {

// One function per room; each lives in <room>_py.cpp and fills the submodule of the same name.
void bind_errors(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_plan_items(pybind11::module_& module);
void bind_balance(pybind11::module_& module);
void bind_sim(pybind11::module_& module);
void bind_runtime(pybind11::module_& module);
// The part of `runtime` that finds devices; called by bind_runtime.
void bind_device(pybind11::module_& module);
// The part of `runtime` that asks devices how they are.
void bind_health(pybind11::module_& module);
// What there is of GPUs: their facts and their parts; called by bind_device.
void bind_gpu(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
// The part of `engine` for devices that work after the call; called by bind_engine.
void bind_queues(pybind11::module_& module);

/// "auto", "nccl" or "copies". `call` is for the message. @throws InvalidArgument for others.
Transport transport_of(const char* call, const std::string& name);

/// Seconds as Python gives them, inf included. `call` is for the message.
/// @throws InvalidArgument if they are negative or no number.
std::chrono::nanoseconds timeout_of(const char* call, double seconds);

}  // namespace paceline::python

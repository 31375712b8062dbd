// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <chrono>
#include <string>
#include <variant>

#include <paceline/comm/communicator.hpp>
#include <paceline/device_id.hpp>
#include <paceline/plan/pool_types.hpp>
#include <paceline/plan/stages.hpp>

namespace paceline::python {

// Each bind_<room> lives in <room>_py.cpp and fills the submodule of the same name.
void bind_errors(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_plan_items(pybind11::module_& module);
void bind_plan_stages(pybind11::module_& module);
// The decisions of a pool; called by bind_plan.
void bind_pool_state(pybind11::module_& module);
void bind_pool_scale(pybind11::module_& module);
void bind_balance(pybind11::module_& module);
void bind_sim(pybind11::module_& module);
// Pipelines, pools, and the data path between GPUs; called by bind_sim.
void bind_sim_pipeline(pybind11::module_& module);
void bind_sim_pool(pybind11::module_& module);
void bind_sim_day(pybind11::module_& module);
void bind_sim_data_path(pybind11::module_& module);
void bind_runtime(pybind11::module_& module);
// Finding devices; called by bind_runtime.
void bind_device(pybind11::module_& module);
// The health of devices, in the submodule `runtime`.
void bind_health(pybind11::module_& module);
// Facts and parts of GPUs; called by bind_device.
void bind_gpu(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
// The parts of `engine` for asynchronous devices; called by bind_engine.
void bind_queues(pybind11::module_& module);
// Pipelines; called by bind_engine.
void bind_pipeline(pybind11::module_& module);
// Independent jobs; called by bind_engine.
void bind_pool(pybind11::module_& module);
// What plans and keeps note of the steps of pipelines; called by bind_engine.
void bind_stage_planner(pybind11::module_& module);
/// Parses "auto" and the other names. `call` begins the message. @throws InvalidArgument for others.
plan::Placement placement_of(const char* call, const std::string& name);
using PlacementFunction = pybind11::typing::Callable<pybind11::object(pybind11::ellipsis)>;
/// A name, or a function of (now, kind, priority, deadline, waiting, candidates), which answers the place of one of the
/// candidates or -1. A candidate is (name, idle, free in seconds, seconds). `throws`: what the function raises is
/// thrown on. Otherwise it may run on any thread, and the text that it returns instead is thrown as an Error.
[[nodiscard]] plan::PoolOptions with_placement(plan::PoolOptions options, const char* call,
                                               const std::variant<std::string, PlacementFunction>& placement,
                                               bool throws);

/// Parses "auto", "gpipe" or "1f1b". @throws InvalidArgument for others.
plan::StageOptions::Kind schedule_kind(const std::string& name);

/// Parses "auto", "nccl" or "copies". `call` names the caller in the message. @throws InvalidArgument for others.
Transport transport_of(const char* call, const std::string& name);

/// Formats the value as Python does: 1.0 stays a float.
template <class Value>
std::string repr_of(const Value& value) {
  return std::string(pybind11::repr(pybind11::cast(value)));
}

/// At most a century, because nanoseconds hold three.
std::chrono::nanoseconds nanoseconds_of(double seconds);

/// Converts Python's seconds, inf included. `call` names the caller in the message.
/// @throws InvalidArgument for negative seconds and NaN.
std::chrono::nanoseconds timeout_of(const char* call, double seconds);

}  // namespace paceline::python

/// In Python a device of a group is a plain int.
template <>
struct pybind11::detail::type_caster<paceline::DeviceId> {
  PYBIND11_TYPE_CASTER(paceline::DeviceId, make_caster<std::size_t>::name);
  bool load(handle source, bool convert) {
    make_caster<std::size_t> number;
    if (!number.load(source, convert)) return false;
    value = paceline::DeviceId(cast_op<std::size_t>(number));
    return true;
  }
  static handle cast(paceline::DeviceId id, return_value_policy policy, handle parent) {
    return make_caster<std::size_t>::cast(id.number(), policy, parent);
  }
};

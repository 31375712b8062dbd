// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/host_topology.hpp>
#include <paceline/runtime/system_info.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using Facts = py::typing::Dict<py::str, py::object>;

const char* kind_name(DeviceKind kind) { return kind == DeviceKind::cuda ? "cuda" : "host"; }

std::string device_repr(const Device& device) {
  std::string text = fmt::format("<paceline.Device {}", device.name);
  if (!device.cores.empty()) {
    text += fmt::format(" {} {}", device.cores.size() == 1 ? "core" : "cores", fmt::join(device.cores, ","));
  }
  if (device.sm_count > 0) text += fmt::format(" {} SMs", device.sm_count);
  if (device.part >= 0) text += fmt::format(" ({:.4g} asked for)", device.fraction);
  if (device.numa_node >= 0) text += fmt::format(" node {}", device.numa_node);
  return text + ">";
}

Facts host_facts() {
  const HostTopology topology = read_host_topology();
  std::vector<int> affinity;
  std::map<int, std::vector<int>> nodes;
  for (const HostCore& core : topology.cores) {
    affinity.push_back(core.index);
    if (core.numa_node >= 0) nodes[core.numa_node].push_back(core.index);
  }
  std::optional<py::dict> limit;
  if (const auto& cpu = topology.cpu_limit) limit = py::dict("cores"_a = cpu->cores(), "source"_a = cpu->source);
  return Facts("cpu_model"_a = read_cpu_model(), "affinity"_a = affinity, "numa_nodes"_a = nodes,
               "cpu_limit"_a = limit);
}

Facts build_facts() {
  const BuildInfo build = build_info();
  return Facts(
      "version"_a = build.version, "compiler"_a = build.compiler, "flags"_a = build.flags, "fmt"_a = build.fmt_version,
      "pybind11"_a = fmt::format("{}.{}.{}", PYBIND11_VERSION_MAJOR, PYBIND11_VERSION_MINOR, PYBIND11_VERSION_MICRO));
}

/// Why this build or machine has no devices, by kind; empty for a kind that has devices.
std::map<std::string, std::string> why_no_devices() {
  std::map<std::string, std::string> reasons;
  for (const Backend* backend : backends()) reasons[std::string(backend->prefix())] = backend->why_none();
  return reasons;
}

}  // namespace

void bind_device(py::module_& module) {
  py::class_<Device>(
      module, "Device",
      R"(A place of execution: ``host:1``, a worker pinned to cores of its own; ``cuda:0``, a GPU; ``cuda:0/1``, a part of one.

A plain value: the name and the properties of the place. `devices`, `find_device` and `partition` make them.)")
      .def_readonly("name", &Device::name, "``host:1``; names are unique.")
      .def_property_readonly(
          "kind", [](const Device& device) { return kind_name(device.kind); }, "``host`` or ``cuda``.")
      .def_readonly("index", &Device::index, "The number after the colon of the name.")
      .def_property_readonly(
          "part", [](const Device& device) { return device.part < 0 ? std::nullopt : std::optional(device.part); },
          "The 1 of ``cuda:0/1``; None for a whole device.")
      .def_readonly(
          "memory_space", &Device::memory_space,
          "Devices of one memory space share memory without copying: all parts of ``cuda:0`` are in ``cuda:0``.")
      .def_readonly(
          "device_class", &Device::device_class,
          "The model of a GPU and its multiprocessors, ``host`` for all host devices. Devices of one class count "
          "as equally fast until measured.")
      .def_property_readonly(
          "sm_count",
          [](const Device& device) { return device.sm_count == 0 ? std::nullopt : std::optional(device.sm_count); },
          "The number of streaming multiprocessors that it computes on; None on the host.")
      .def_readonly("fraction", &Device::fraction,
                    "The fraction of the GPU that `partition` was asked for; 1.0 for a whole device.")
      .def_property_readonly(
          "cores", [](const Device& device) { return py::typing::Tuple<int, py::ellipsis>(py::cast(device.cores)); },
          "The cores that the worker is pinned to; empty if pinning is impossible.")
      .def_property_readonly(
          "numa_node",
          [](const Device& device) { return device.numa_node < 0 ? std::nullopt : std::optional(device.numa_node); },
          "The NUMA node of the cores; None if unknown or if there are several.")
      .def("__repr__", &device_repr)
      .def("__str__", [](const Device& device) { return device.name; })
      .def("__hash__", [](const Device& device) { return std::hash<std::string>{}(device.name); })
      .def("__eq__", [](const Device& self, const py::object& other) {
        return py::isinstance<Device>(other) && self == other.cast<const Device&>();
      });
  // Both read the splits of GPUs, and may wait while a split is ended.
  module.def(
      "devices", &devices, py::call_guard<BlockingRegion>(),
      R"(Every device that this process can use now, in order: GPUs, then host devices. Parts of GPUs are not listed.

There is one host device per core of the process's affinity mask, limited by its cgroup's CPU quota. With a quota, a device is pinned
to several cores, because every core of the mask is given to a device.)");
  module.def("find_device", &find_device, "name"_a, py::call_guard<BlockingRegion>(),
             R"(The device called `name`, such as ``host:1``.

More host devices than cores are allowed; they share cores. Parts of a GPU, such as ``cuda:0/1``, exist once `partition` has made them.

Raises
------
InvalidArgument
    If the name is malformed or there is no such device; the message lists those that exist.)");
  bind_gpu(module);
  module.def("host_facts", &host_facts,
             "What the operating system says about the processor, and how much of it this process may use.");
  module.def("why_no_devices", &why_no_devices,
             "For each kind of device that this build supports: why there is no device; empty if there is one.");
  module.def("build_facts", &build_facts, "How the compiled part was built.");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <paceline/runtime/device.hpp>
#include <paceline/runtime/gpu_facts.hpp>
#include <paceline/runtime/partition.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using Facts = py::typing::Dict<py::str, py::object>;
using Name = std::variant<std::string, Device>;

const std::string& device_name_of(const Name& device) {
  const auto* found = std::get_if<Device>(&device);
  return found != nullptr ? found->name : std::get<std::string>(device);
}

std::string text_of(const CudaVersion& version) { return fmt::format("{}.{}", version.major, version.minor); }

std::vector<Facts> all_gpu_facts() {
  std::vector<Facts> all;
  for (const GpuFacts& gpu : gpu_facts()) {
    Facts facts;
    facts["device"] = gpu.device;
    facts["model"] = gpu.model;
    facts["pci_bus_id"] = gpu.pci_bus_id;
    facts["numa_node"] = gpu.numa_node < 0 ? std::nullopt : std::optional(gpu.numa_node);
    facts["compute_capability"] = text_of(gpu.compute_capability);
    facts["sm_count"] = gpu.sm_count;
    facts["peak_clock_mhz"] = gpu.peak_clock_khz / 1000;
    facts["memory_bytes"] = gpu.memory_bytes;
    facts["copy_engine_count"] = gpu.copy_engine_count;
    facts["peers"] = gpu.peers;
    facts["partition_sm_count"] = gpu.partition_sm_count;
    facts["most_partitions"] = gpu.most_partitions;
    facts["why_no_partitions"] = gpu.why_no_partitions;
    facts["mig"] = gpu.mig;
    facts["driver"] = text_of(gpu.driver);
    facts["runtime"] = text_of(gpu.runtime);
    all.push_back(std::move(facts));
  }
  return all;
}

}  // namespace

void bind_gpu(py::module_& module) {
  module.def("gpu_facts", &all_gpu_facts,
             R"(What the CUDA runtime and the driver say about each GPU; an empty list without a GPU.

Returns
-------
list of dict
    ``device``, ``model``, ``pci_bus_id``, ``numa_node``, ``compute_capability``, ``sm_count``, ``peak_clock_mhz``, ``memory_bytes``,
    ``copy_engine_count``, ``peers`` (the GPUs whose memory it can access directly), ``partition_sm_count`` (SMs of the smallest part),
    ``most_partitions``, ``why_no_partitions`` (empty if it can be partitioned), ``mig`` (of a MIG slice, what that means; else empty), ``driver`` and ``runtime`` (CUDA versions).)");
  module.def(
      "partition",
      [](const Name& device, const std::vector<double>& fractions) {
        return partition(device_name_of(device), fractions);
      },
      py::arg("device"), py::arg("fractions"), py::call_guard<py::gil_scoped_release>(),
      "The compiled part of `paceline.partition`.");
  module.def(
      "release_partitions",
      [](const Name& device, double timeout) {
        release_partitions(device_name_of(device), timeout_of("release_partitions", timeout));
      },
      py::arg("device"), py::arg("timeout") = 10.0, py::call_guard<py::gil_scoped_release>(),
      "The compiled part of `paceline.release_partitions`.");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/gpu_facts.hpp>
#include <paceline/runtime/partition.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
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
    all.emplace_back("device"_a = gpu.device, "model"_a = gpu.model, "pci_bus_id"_a = gpu.pci_bus_id,
                     "numa_node"_a = gpu.numa_node < 0 ? std::nullopt : std::optional(gpu.numa_node),
                     "compute_capability"_a = text_of(gpu.compute_capability), "sm_count"_a = gpu.sm_count,
                     "peak_clock_mhz"_a = gpu.peak_clock_khz / 1000, "memory_bytes"_a = gpu.memory_bytes,
                     "copy_engine_count"_a = gpu.copy_engine_count, "peers"_a = gpu.peers,
                     "partition_sm_count"_a = gpu.partition_sm_count, "most_partitions"_a = gpu.most_partitions,
                     "why_no_partitions"_a = gpu.why_no_partitions, "mig"_a = gpu.mig, "driver"_a = text_of(gpu.driver),
                     "runtime"_a = text_of(gpu.runtime));
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
      "device"_a, "fractions"_a, py::call_guard<BlockingRegion>(), "The compiled part of `paceline.partition`.");
  module.def(
      "release_partitions",
      [](const Name& device, double timeout) {
        release_partitions(device_name_of(device), timeout_of("release_partitions", timeout));
      },
      "device"_a, "timeout"_a = 10.0, py::call_guard<BlockingRegion>(),
      "The compiled part of `paceline.release_partitions`.");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <chrono>
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

const std::string& name_of(const Name& device) {
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
    facts["driver"] = text_of(gpu.driver);
    facts["runtime"] = text_of(gpu.runtime);
    all.push_back(std::move(facts));
  }
  return all;
}

}  // namespace

void bind_gpu(py::module_& module) {
  module.def("gpu_facts", &all_gpu_facts,
             R"(What the CUDA runtime and the driver tell of each GPU; an empty list where there is none.

Returns
-------
list of dict
    ``device``, ``model``, ``pci_bus_id``, ``numa_node``, ``compute_capability``, ``sm_count``, ``peak_clock_mhz``, ``memory_bytes``,
    ``copy_engine_count``, ``peers`` (the GPUs whose memory it reaches without the host), ``partition_sm_count`` (of the smallest part),
    ``most_partitions``, ``why_no_partitions`` (empty where there can be some), ``driver`` and ``runtime`` (CUDA versions).)");
  module.def(
      "partition",
      [](const Name& device, const std::vector<double>& fractions) { return partition(name_of(device), fractions); },
      py::arg("device"), py::arg("fractions"), py::call_guard<py::gil_scoped_release>(),
      R"(Split a GPU's streaming multiprocessors (SMs) into parts that are devices of their own.

The parts, ``cuda:0/0``, ``cuda:0/1``, ..., share the GPU's memory, and compute at the same time, each on its own SMs. Memory bandwidth,
L2 cache, clock and copy engines stay the whole GPU's.

A GPU has one split at a time, the process's. Asked for again it gives the same devices; another one takes its place if nothing uses the
parts any more. `release_partitions` makes the GPU whole.

Parameters
----------
device
    The GPU, such as ``"cuda:0"``.
fractions
    Of the GPU's SMs, one for each part; together at most 1. They are rounded to the groups of SMs that CUDA makes (8 SMs on compute
    capability 9.0 and newer), equal fractions alike; SMs beyond whole groups stay unused.

Returns
-------
list of Device
    The parts. Their ``sm_count`` says what each got, ``fraction`` what was asked for.

Raises
------
InvalidArgument
    If a fraction is not positive, too small for a group (the message names the smallest that is possible) or all of them are more
    than 1 together; if `device` is itself a part; if another split of it is in use.
Unavailable
    If the device has no parts (``host:0``), or the driver is older than CUDA 12.5.

Examples
--------
>>> parts = paceline.partition("cuda:0", [0.75, 0.25])  # doctest: +SKIP
>>> [part.sm_count for part in parts]  # of an H100's 132 # doctest: +SKIP
[96, 32])");
  module.def(
      "release_partitions",
      [](const Name& device, double timeout) {
        release_partitions(name_of(device), timeout_of("release_partitions", timeout));
      },
      py::arg("device"), py::arg("timeout") = 10.0, py::call_guard<py::gil_scoped_release>(),
      R"(End the split of a GPU. Without one nothing happens.

Everything on the parts must be gone before, in this order: tensors that were computed there; where you ran PyTorch on a part's stream
by yourself, what it remembers of that stream (``torch._C._cuda_clearCublasWorkspaces()``, then ``torch.cuda.empty_cache()``); trainers
and whatever else holds the streams. What dropped streams still have to do is waited for.

Parameters
----------
device
    The GPU, such as ``"cuda:0"``.
timeout
    Seconds to wait, ``inf`` for ever.

Raises
------
InvalidArgument
    If a part is still in use; the message names it. Or if `timeout` is negative or no number.
Timeout
    If work on a part does not come to its end. The split stays.)");
}

}  // namespace paceline::python

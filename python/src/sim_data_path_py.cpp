// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <optional>
#include <string>

#include <paceline/sim/data_path.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;

using namespace sim;

void bind_sim_data_path(py::module_& module) {
  module.def(
      "launch_rate", &launch_rate, "threads"_a,
      R"(How many operators of forward and backward a second so many threads of one process start together, as measured on one host.)");
  module.def(
      "simulate_data_path",
      [](std::size_t gpus, double parameters, double bytes_each, double forward_seconds, double backward_seconds,
         double update_seconds, const std::string& link, std::optional<double> bandwidth,
         std::optional<double> latency_seconds, double bucket_bytes, double operators) {
        DataPathOptions options{.gpus = gpus,
                                .parameters = parameters,
                                .bytes_each = bytes_each,
                                .forward_seconds = forward_seconds,
                                .backward_seconds = backward_seconds,
                                .update_seconds = update_seconds,
                                .bucket_bytes = bucket_bytes,
                                .operators = operators,
                                .links = link_speeds(link)};
        if (bandwidth) options.links.pair_bytes_per_second = options.links.port_bytes_per_second = *bandwidth;
        if (latency_seconds) options.links.latency_seconds = *latency_seconds;
        py::dict ways;
        for (const DataPathOutcome& one : simulate_data_path(options)) {
          ways[one.way.c_str()] =
              py::dict("step_seconds"_a = one.step_seconds, "exposed_seconds"_a = one.exposed_seconds);
        }
        return ways;
      },
      py::kw_only(), "gpus"_a, "parameters"_a, "bytes_each"_a = 2.0, "forward_seconds"_a, "backward_seconds"_a,
      "update_seconds"_a = 0.0, "link"_a = "nvlink4", "bandwidth"_a = py::none(), "latency_seconds"_a = py::none(),
      "bucket_bytes"_a = 25.0 * (1 << 20), "operators"_a = 0.0,
      R"(A data parallel step on equal GPUs, on a virtual clock: what gradients and parameters cost beyond the computing.

Deterministic. A model with assumed links (`paceline/sim/data_path.hpp`), not a measurement.

Parameters
----------
gpus
    Their number, 2 to 64.
parameters, bytes_each
    The number of parameters, and the bytes of each and of its gradient.
forward_seconds, backward_seconds
    Of a step on each GPU. They come to the buckets at an even pace.
update_seconds
    The optimizer over all parameters, on one GPU.
link
    ``"nvlink4"``, ``"nvlink5"``, ``"pcie4"``, ``"pcie5"``, or ``"host"``: PCIe 4 without peer access.
bandwidth, latency_seconds
    Bytes per second of a pair and of a port, in one direction, and the start of a copy. Default: those of `link`.
bucket_bytes
    The size of a bucket.
operators
    How many a step starts on each GPU. A step takes at least as long as that: a thread of one process for each GPU, and a process for each GPU
    with ``ring``. 0: starting them takes no time, as with CUDA graphs.

Returns
-------
dict
    For each way, ``serial``, ``buckets``, ``ranges``, ``sharded`` and ``ring``, a dict with `step_seconds`, and `exposed_seconds`: what a step
    takes beyond forward, backward and update.

Raises
------
InvalidArgument
    For invalid arguments.)");
}

}  // namespace paceline::python

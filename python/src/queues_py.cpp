// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "queued_program.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using Handle = std::optional<std::uintptr_t>;

Handle handle_of(const Stream* stream) {
  if (stream == nullptr) return std::nullopt;
  return reinterpret_cast<std::uintptr_t>(stream->native());
}

void* native(const Handle& handle) { return reinterpret_cast<void*>(handle.value_or(0)); }

std::shared_ptr<TrainerQueues> make(const DeviceGroup& group, const Handle& stream, std::int64_t run_ahead,
                                    double timeout, const std::string& transport) {
  if (!(timeout > 0.0)) throw InvalidArgument(fmt::format("timeout is {} s; it must be positive.", timeout));
  const std::chrono::nanoseconds limit = nanoseconds_of(timeout);
  DeviceQueueOptions options{.stream = native(stream), .run_ahead = run_ahead, .timeout = limit};
  options.collectives.transport = transport_of("DataParallel", transport);
  // Half the limit, so that a hanging collective is reported before its device counts as hanging.
  options.collectives.timeout = std::min(options.collectives.timeout, limit / 2);
  const BlockingRegion region;
  return std::make_shared<TrainerQueues>(group, options);
}

template <class Of>
auto of_each_device(const DeviceQueues& queues, Of of) {
  std::vector<decltype(of(std::size_t{0}))> values;
  for (std::size_t d = 0; d < queues.device_count(); ++d) values.push_back(of(d));
  return values;
}

void set_copies(TrainerQueues& shared,
                const std::vector<std::tuple<std::size_t, std::uintptr_t, std::uintptr_t, std::size_t>>& copies) {
  shared.copies.clear();
  for (const auto& [space, to, from, bytes] : copies) {
    shared.copies.push_back({space, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes});
  }
}

}  // namespace

void bind_queues(py::module_& module) {
  py::class_<TrainerQueues, std::shared_ptr<TrainerQueues>>(
      module, "DeviceQueues", "The queues of a group's devices during steps, and the waits between them.")
      .def(py::init(&make), py::arg("group"), py::kw_only(), py::arg("stream") = py::none(), py::arg("run_ahead") = 1,
           py::arg("timeout") = 600.0, py::arg("transport") = "auto")
      .def_property_readonly(
          "transport", [](const TrainerQueues& shared) { return shared.queues.transport(); },
          "How data gets from one GPU to another, with the reason; empty with one GPU.")
      .def_property_readonly("home_space", [](const TrainerQueues& shared) { return shared.queues.home_space(); })
      .def_property_readonly(
          "spaces",
          [](const TrainerQueues& shared) {
            return of_each_device(shared.queues, [&](DeviceId d) { return shared.queues.space_of(d); });
          },
          "Per device, the number of its memory space.")
      .def_property_readonly(
          "streams",
          [](const TrainerQueues& shared) {
            return of_each_device(shared.queues, [&](DeviceId d) { return handle_of(shared.queues.stream(d)); });
          },
          "Per device, the stream that it computes on; None on the host.")
      .def_property_readonly(
          "sources",
          [](const TrainerQueues& shared) {
            return of_each_device(shared.queues, [&](DeviceId d) { return handle_of(shared.queues.source_stream(d)); });
          },
          "Per device, the stream of the home GPU that reads for it; None for devices of the home GPU.")
      .def_property_readonly(
          "readers",
          [](const TrainerQueues& shared) {
            return of_each_device(shared.queues, [&](DeviceId d) {
              const Stream* const copies = shared.queues.copy_stream(shared.queues.space_of(d));
              return handle_of(copies != nullptr ? copies : &shared.queues.home_stream());
            });
          },
          "Per device, the stream that reads what it delivers.")
      .def_property_readonly(
          "pool_peaks",
          [](const TrainerQueues& shared) {
            return of_each_device(shared.queues, [&](DeviceId d) -> std::optional<std::size_t> {
              const std::size_t space = shared.queues.space_of(d);
              if (shared.queues.on_host(space)) return std::nullopt;
              return shared.queues.maker(space).peak_bytes();
            });
          },
          "Per device, the most bytes that its GPU's pool has given out at once; None on the host.")
      .def_property_readonly("home_stream",
                             [](const TrainerQueues& shared) { return handle_of(&shared.queues.home_stream()); })
      .def(
          "set_stream", [](TrainerQueues& shared, const Handle& stream) { shared.queues.set_stream(native(stream)); },
          py::arg("stream"), "From now on, order steps on this stream of the caller.")
      .def("set_copies", &set_copies, py::arg("copies"),
           "Set the copies to other memory spaces at the start of each step: (space, to, from, bytes).")
      .def(
          "restart_run", [](TrainerQueues& shared, DeviceId device) { shared.queues.restart_run(device); },
          py::arg("device"), "Restart the timing of the current run: the device has only waited so far.")
      .def("drain", [](TrainerQueues& shared) { shared.queues.drain(); }, "Return when all enqueued work is done.");
}

}  // namespace paceline::python

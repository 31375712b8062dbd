// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "gpu_links_py.hpp"
#include "python_program.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using Handle = std::optional<std::uintptr_t>;

Handle handle_of(const Stream* stream) {
  if (stream == nullptr) return std::nullopt;
  return reinterpret_cast<std::uintptr_t>(stream->native());
}

NativeStream native(const Handle& handle) { return reinterpret_cast<NativeStream>(handle.value_or(0)); }

std::shared_ptr<TrainerQueues> make_queues(const DeviceGroup& group, const Handle& stream, std::int64_t run_ahead,
                                           double timeout, const std::string& transport,
                                           const std::optional<std::string>& reduce_dtype) {
  if (!(timeout > 0.0)) throw InvalidArgument(fmt::format("timeout is {} s; it must be positive.", timeout));
  const std::chrono::nanoseconds limit = nanoseconds_of(timeout);
  DeviceQueueOptions options{.stream = native(stream), .run_ahead = run_ahead, .timeout = limit};
  options.collectives.transport = transport_of("DataParallel", transport);
  options.measure_links = options.collectives.transport == Transport::automatic;
  if (reduce_dtype.has_value()) {
    options.reduce_dtype = *reduce_dtype == name_of(DType::float16) ? DType::float16 : DType::bfloat16;
  }
  // Half the limit, so that a hanging collective is reported before its device counts as hanging.
  options.collectives.timeout = std::min(options.collectives.timeout, limit / 2);
  const BlockingRegion region;
  return std::make_shared<TrainerQueues>(group, options);
}

/// A getter of of(queues, device) for each device.
template <class Of>
auto of_each_device(Of of) {
  return [of](const TrainerQueues& queues) {
    std::vector<std::decay_t<std::invoke_result_t<Of, const TrainerQueues&, DeviceId>>> values;
    for (const DeviceId id : queues.devices()) values.push_back(std::invoke(of, queues, id));
    return values;
  };
}

using Copies = std::vector<std::tuple<std::size_t, std::uintptr_t, std::uintptr_t, std::size_t, std::size_t>>;

void set_copies(TrainerQueues& queues, const Copies& parameters, const Copies& buffers) {
  queues.copies.clear();
  for (const Copies* const copies : {&buffers, &parameters}) {
    for (const auto& [space, to, from, bytes, bucket] : *copies) {
      queues.copies.push_back({space, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, bucket,
                               copies == &parameters});
    }
  }
  queues.in_buckets = std::ranges::any_of(queues.copies, [](const SpaceCopy& copy) { return copy.bucket > 0; });
}

using DeviceCopies = std::vector<std::tuple<DeviceId, std::uintptr_t, std::uintptr_t, std::size_t>>;

std::vector<DeviceCopy> list_of(const DeviceCopies& copies) {
  std::vector<DeviceCopy> list;
  for (const auto& [device, to, from, bytes] : copies) {
    list.push_back({device, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes});
  }
  return list;
}

}  // namespace

void bind_queues(py::module_& module) {
  py::class_<TrainerQueues, std::shared_ptr<TrainerQueues>>(
      module, "DeviceQueues", "The queues of a group's devices during steps, and the waits between them.")
      .def(py::init(&make_queues), "group"_a, py::kw_only(), "stream"_a = py::none(), "run_ahead"_a = 1,
           "timeout"_a = 600.0, "transport"_a = "auto", "reduce_dtype"_a = py::none())
      .def_property_readonly("transport", &TrainerQueues::transport,
                             "How data gets from one GPU to another, with the reason; empty with one GPU.")
      .def_property_readonly(
          "links", [](const TrainerQueues& queues) { return list_of(queues.links()); },
          "The links between GPUs, as `measure_links` returns them. Empty if not measured.")
      .def_property_readonly("home_space", &TrainerQueues::home_space)
      .def_property_readonly("spaces", of_each_device(&TrainerQueues::space_of),
                             "Per device, the number of its memory space.")
      .def_property_readonly("streams", of_each_device([](const TrainerQueues& queues, DeviceId d) {
                               return handle_of(queues.stream(d));
                             }),
                             "Per device, the stream that it computes on; None on the host.")
      .def_property_readonly(
          "sources",
          of_each_device([](const TrainerQueues& queues, DeviceId d) { return handle_of(queues.source_stream(d)); }),
          "Per device, the stream of the home GPU that reads for it; None for devices of the home GPU.")
      .def_property_readonly("pool_peaks",
                             of_each_device([](const TrainerQueues& queues, DeviceId d) -> std::optional<std::size_t> {
                               const std::size_t space = queues.space_of(d);
                               if (queues.on_host(space)) return std::nullopt;
                               return queues.maker(space).peak_bytes();
                             }),
                             "Per device, the most bytes that its GPU's pool has given out at once; None on the host.")
      .def_property_readonly("home_stream",
                             [](const TrainerQueues& queues) { return handle_of(&queues.home_stream()); })
      .def(
          "set_stream", [](TrainerQueues& queues, const Handle& stream) { queues.set_stream(native(stream)); },
          "stream"_a, "From now on, order steps on this stream of the caller.")
      .def("set_copies", &set_copies, "parameters"_a, "buffers"_a = Copies{},
           "Set the copies to other memory spaces at the start of each step: (space, to, from, bytes, bucket), by "
           "bucket; buffers all with the first one. Parameters may be relayed from space to space. "
           "With several buckets the body has to call need().")
      .def("need", &TrainerQueues::need, "device"_a, "bucket"_a, py::call_guard<BlockingRegion>(),
           "Let the device's queue wait for this bucket of the parameters.")
      .def("restart_run", &TrainerQueues::restart_run, "device"_a,
           "Restart the timing of the current run: the device has only waited so far.")
      .def(
          "seal",
          [](TrainerQueues& queues, DeviceId device, std::size_t k, std::uintptr_t address, std::size_t count,
             int dtype, std::uintptr_t written) {
            queues.seal(device, k, {reinterpret_cast<void*>(address), count, static_cast<DType>(dtype)},
                        reinterpret_cast<NativeEvent>(written));
          },
          "device"_a, "k"_a, "address"_a, "count"_a, "dtype"_a, "written"_a = 0, py::call_guard<BlockingRegion>(),
          "The device's k-th bucket is final: its sum may begin after this event, 0: after the stream's work so far.")
      .def(
          "begin_update",
          [](TrainerQueues& queues, const std::vector<DeviceId>& devices, const DeviceCopies& copies) {
            queues.begin_update(devices, list_of(copies));
          },
          "devices"_a, "copies"_a, py::call_guard<WithoutGil>(),
          "Let the devices wait for the caller's work so far and pull (device, to, from, bytes) from home's memory.")
      .def(
          "end_update",
          [](TrainerQueues& queues, const std::vector<DeviceId>& devices, const DeviceCopies& copies) {
            queues.end_update(devices, list_of(copies));
          },
          "devices"_a, "copies"_a, py::call_guard<WithoutGil>(),
          "Let the home stream wait for the devices and pull (device, to, from, bytes) into home's memory.")
      .def("release_memory", &TrainerQueues::release_memory, "Give back what the pools of the GPUs hold without use.")
      .def("drain", &TrainerQueues::drain, "Return when all enqueued work is done.");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/comm/nccl_info.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "borrowed_array.hpp"
#include "gpu_links_py.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

// One argument of a collective: a list or tuple with one array per device.
class ArrayList {
 public:
  ArrayList(py::handle given, const char* call, const char* name, Access access, const DeviceGroup& group) {
    if (!py::isinstance<py::list>(given) && !py::isinstance<py::tuple>(given)) {
      throw InvalidArgument(fmt::format("{}: {} is a {}; pass a list with one array per device", call, name,
                                        std::string(py::str(py::type::handle_of(given).attr("__name__")))));
    }
    // A copy, because __dlpack__ is foreign code that could change the list during the loop.
    const py::tuple arrays(py::reinterpret_borrow<py::object>(given));
    const std::vector<Device>& devices = group.devices();
    arrays_.reserve(arrays.size());
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      // the collective reports surplus arrays with their number
      const Device& device = i < devices.size() ? devices[i] : devices.back();
      arrays_.emplace_back(arrays[i], fmt::format("{}: {}[{}]", call, name, i), access, device);
      views_.push_back(arrays_.back().view());
      stream_unknown_ = stream_unknown_ || arrays_.back().stream_unknown();
    }
  }
  [[nodiscard]] const std::vector<BufferView>& views() const { return views_; }
  [[nodiscard]] bool stream_unknown() const { return stream_unknown_; }

 private:
  std::vector<BorrowedArray> arrays_;
  std::vector<BufferView> views_;
  bool stream_unknown_ = false;
};

ReduceOp parse_op(const char* call, const std::string& name) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max}) {
    if (name == name_of(op)) return op;
  }
  throw InvalidArgument(fmt::format("{}: there is no operation '{}'; use 'sum', 'mean', 'min' or 'max'", call, name));
}

std::unique_ptr<Communicator> make_communicator(const DeviceGroup& group, const std::string& transport,
                                                double timeout) {
  CommunicatorOptions options{.transport = transport_of("Communicator", transport)};
  if (!(timeout > 0.0)) {
    throw InvalidArgument(fmt::format("Communicator: timeout is {}; use a positive number of seconds", timeout));
  }
  options.timeout = nanoseconds_of(timeout);
  const BlockingRegion region;
  return std::make_unique<Communicator>(group, options);
}

/// Makes the call without the GIL. Ctrl-C does not interrupt it, because the arrays are in use until it returns. If a
/// producer's stream is unknown, the caller waits for the result.
template <class Call>
void run_call(Communicator& communicator, bool stream_unknown, Call call) {
  const WithoutGil without_gil;
  call();
  if (stream_unknown) communicator.wait();
}

void all_reduce(Communicator& communicator, py::handle buffers, const std::string& op) {
  const ReduceOp operation = parse_op("all_reduce", op);
  const ArrayList arrays(buffers, "all_reduce", "buffers", Access::write, communicator.group());
  run_call(communicator, arrays.stream_unknown(), [&] { communicator.all_reduce(arrays.views(), operation); });
}

void reduce_scatter(Communicator& communicator, py::handle inputs, py::handle outputs, const std::string& op) {
  const ReduceOp operation = parse_op("reduce_scatter", op);
  const ArrayList from(inputs, "reduce_scatter", "inputs", Access::read, communicator.group());
  const ArrayList to(outputs, "reduce_scatter", "outputs", Access::write, communicator.group());
  run_call(communicator, from.stream_unknown() || to.stream_unknown(),
           [&] { communicator.reduce_scatter(from.views(), to.views(), operation); });
}

void all_gather(Communicator& communicator, py::handle inputs, py::handle outputs) {
  const ArrayList from(inputs, "all_gather", "inputs", Access::read, communicator.group());
  const ArrayList to(outputs, "all_gather", "outputs", Access::write, communicator.group());
  run_call(communicator, from.stream_unknown() || to.stream_unknown(),
           [&] { communicator.all_gather(from.views(), to.views()); });
}

void broadcast(Communicator& communicator, py::handle buffers, std::int64_t root) {
  if (root < 0) throw InvalidArgument(fmt::format("broadcast: root is {}; use the index of a device, from 0", root));
  const ArrayList arrays(buffers, "broadcast", "buffers", Access::write, communicator.group());
  run_call(communicator, arrays.stream_unknown(),
           [&] { communicator.broadcast(arrays.views(), static_cast<std::size_t>(root)); });
}

void send(Communicator& communicator, py::handle input, py::handle output, std::int64_t source, std::int64_t target) {
  const std::vector<Device>& devices = communicator.group().devices();
  const auto device_at = [&devices](const char* name, std::int64_t index) -> const Device& {
    if (index >= 0 && index < std::ssize(devices)) return devices[static_cast<std::size_t>(index)];
    throw InvalidArgument(
        fmt::format("send: {} is {}; use the index of a device, from 0 to {}", name, index, std::ssize(devices) - 1));
  };
  const Device& reader = device_at("source", source);
  const Device& writer = device_at("target", target);
  const BorrowedArray from(input, "send: input", Access::read, reader);
  const BorrowedArray to(output, "send: output", Access::write, writer);
  run_call(communicator, from.stream_unknown() || to.stream_unknown(), [&] {
    communicator.send(from.view(), to.view(), static_cast<std::size_t>(source), static_cast<std::size_t>(target));
  });
}

std::map<std::string, std::string> library_info() {
  const NcclInfo info = nccl_info();
  return {{"version", info.version}, {"path", info.path}, {"why_none", info.why_none}};
}

}  // namespace

Transport transport_of(const char* call, const std::string& name) {
  if (name == "auto") return Transport::automatic;
  if (name == "nccl") return Transport::nccl;
  if (name == "copies") return Transport::copies;
  throw InvalidArgument(fmt::format("{}: there is no transport '{}'; use 'auto', 'nccl' or 'copies'", call, name));
}

py::list list_of(const paceline::GpuLinks& links) {
  py::list list;
  for (const GpuLink& link : links.pairs) {
    list.append(py::dict("from"_a = link.from, "to"_a = link.to, "kind"_a = name_of(link.kind),
                         "bytes_per_second"_a = link.bytes_per_second,
                         "push_bytes_per_second"_a = link.push_bytes_per_second, "pushed"_a = link.pushed));
  }
  return list;
}

void bind_comm(py::module_& module) {
  py::class_<Communicator>(module, "Communicator", "The compiled part of `paceline.Communicator`.")
      .def(py::init(&make_communicator), "group"_a, "transport"_a, "timeout"_a)
      .def("all_reduce", &all_reduce, "buffers"_a, "op"_a)
      .def("reduce_scatter", &reduce_scatter, "inputs"_a, "outputs"_a, "op"_a)
      .def("all_gather", &all_gather, "inputs"_a, "outputs"_a)
      .def("broadcast", &broadcast, "buffers"_a, "root"_a)
      .def("send", &send, "input"_a, "output"_a, "source"_a, "target"_a)
      .def("wait", &Communicator::wait, py::call_guard<BlockingRegion>())
      .def("close", &Communicator::close, py::call_guard<BlockingRegion>())
      .def("description", &Communicator::description);
  module.def("nccl_info", &library_info,
             "NCCL's ``version`` and ``path``, or ``why_none`` if there is no NCCL. Loads NCCL if needed; "
             "needs no GPU.");
  module.def("set_nccl_path", &set_nccl_path, "path"_a, "Set where NCCL is installed. No effect once NCCL is loaded.");
  module.def(
      "measure_links",
      [](const DeviceGroup& group) {
        const paceline::GpuLinks links = [&] {
          const BlockingRegion region;
          return measure_links(group);
        }();
        return list_of(links);
      },
      "group"_a,
      "The links between the GPUs of a group, measured once in a process, within a second: ``from``, ``to``, ``kind``, "
      "``bytes_per_second``, ``push_bytes_per_second`` if the source copies (0: unknown), and ``pushed``, whether it "
      "does so from now on.");
  module.def("reduce_isa", &reduce_isa, "The instruction set that the reduction kernels use on this processor.");
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/error.hpp>

#include "bindings.hpp"
#include "borrowed_array.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

// One argument of a collective: a list or tuple with an array for each device.
class ArrayList {
 public:
  ArrayList(py::handle given, const char* call, const char* name, Access access) {
    if (!py::isinstance<py::list>(given) && !py::isinstance<py::tuple>(given)) {
      throw InvalidArgument(fmt::format("{}: {} is a {}; pass a list with one array per device", call, name,
                                        std::string(py::str(py::type::handle_of(given).attr("__name__")))));
    }
    // A copy: __dlpack__ is foreign code, which could change a list under our feet.
    const py::tuple arrays(py::reinterpret_borrow<py::object>(given));
    arrays_.reserve(arrays.size());
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      arrays_.emplace_back(arrays[i], fmt::format("{}: {}[{}]", call, name, i), access);
      views_.push_back(arrays_.back().view());
    }
  }
  [[nodiscard]] const std::vector<BufferView>& views() const { return views_; }

 private:
  std::vector<BorrowedArray> arrays_;
  std::vector<BufferView> views_;
};

ReduceOp parse_op(const char* call, const std::string& name) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max}) {
    if (name == name_of(op)) return op;
  }
  throw InvalidArgument(fmt::format("{}: there is no operation '{}'; use 'sum', 'mean', 'min' or 'max'", call, name));
}

void all_reduce(Communicator& communicator, py::handle buffers, const std::string& op) {
  const ReduceOp operation = parse_op("all_reduce", op);
  const ArrayList arrays(buffers, "all_reduce", "buffers", Access::write);
  const py::gil_scoped_release without_gil;
  communicator.all_reduce(arrays.views(), operation);
}

void reduce_scatter(Communicator& communicator, py::handle inputs, py::handle outputs, const std::string& op) {
  const ReduceOp operation = parse_op("reduce_scatter", op);
  const ArrayList from(inputs, "reduce_scatter", "inputs", Access::read);
  const ArrayList to(outputs, "reduce_scatter", "outputs", Access::write);
  const py::gil_scoped_release without_gil;
  communicator.reduce_scatter(from.views(), to.views(), operation);
}

void all_gather(Communicator& communicator, py::handle inputs, py::handle outputs) {
  const ArrayList from(inputs, "all_gather", "inputs", Access::read);
  const ArrayList to(outputs, "all_gather", "outputs", Access::write);
  const py::gil_scoped_release without_gil;
  communicator.all_gather(from.views(), to.views());
}

void broadcast(Communicator& communicator, py::handle buffers, std::int64_t root) {
  if (root < 0) throw InvalidArgument(fmt::format("broadcast: root is {}; use the index of a device, from 0", root));
  const ArrayList arrays(buffers, "broadcast", "buffers", Access::write);
  const py::gil_scoped_release without_gil;
  communicator.broadcast(arrays.views(), static_cast<std::size_t>(root));
}

}  // namespace

void bind_comm(py::module_& module) {
  py::class_<Communicator>(module, "Communicator", "The compiled part of `paceline.Communicator`.")
      .def(py::init<DeviceGroup>(), py::arg("group"))
      .def("all_reduce", &all_reduce, py::arg("buffers"), py::arg("op"))
      .def("reduce_scatter", &reduce_scatter, py::arg("inputs"), py::arg("outputs"), py::arg("op"))
      .def("all_gather", &all_gather, py::arg("inputs"), py::arg("outputs"))
      .def("broadcast", &broadcast, py::arg("buffers"), py::arg("root"));
  module.def("reduce_isa", &reduce_isa, "The instruction set that the reduction kernels use on this processor.");
}

}  // namespace paceline::python

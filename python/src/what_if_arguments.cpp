// SPDX-License-Identifier: Apache-2.0
#include "what_if_arguments.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>

#include <paceline/error.hpp>

namespace py = pybind11;

namespace paceline::python {
namespace {

std::string shown(py::handle value) { return py::repr(value).cast<std::string>(); }

[[noreturn]] void refuse(const char* name, py::handle value, const char* wanted) {
  throw InvalidArgument(fmt::format("what_if: {} is {}; give {}", name, shown(value), wanted));
}

/// The entries of an iterable. Nothing for a string, whose entries would be letters, and for anything that is not
/// iterable.
std::optional<std::vector<py::object>> entries_of(py::handle value) {
  if (py::isinstance<py::str>(value) || py::isinstance<py::bytes>(value)) return std::nullopt;
  if (!py::isinstance<py::iterable>(value)) return std::nullopt;
  std::vector<py::object> entries;
  for (const py::handle entry : value) entries.push_back(py::reinterpret_borrow<py::object>(entry));
  return entries;
}

/// The value of a number from Python, NumPy or torch. Nothing for other objects, bool included.
std::optional<double> number_of(py::handle value) {
  if (py::isinstance<py::bool_>(value) || PyNumber_Check(value.ptr()) == 0) return std::nullopt;
  const double number = PyFloat_AsDouble(value.ptr());
  if (number != -1.0 || PyErr_Occurred() == nullptr) return number;
  PyErr_Clear();  // e.g. for an array of several numbers
  return std::nullopt;
}

std::size_t index_of(const balance::Balancer& balancer, py::handle name) {
  std::vector<std::string> known;
  const bool is_text = py::isinstance<py::str>(name);
  for (const balance::DeviceProfile& device : balancer.options().devices) {
    if (is_text && device.name == name.cast<std::string>()) return known.size();
    known.push_back(device.name);
  }
  throw InvalidArgument(
      fmt::format("what_if: there is no device {}; the devices are {}", shown(name), fmt::join(known, ", ")));
}

void read_speeds(const balance::Balancer& balancer, py::handle speeds, balance::WhatIfOptions& options) {
  constexpr const char* kWanted = "a dictionary with a factor for each name, such as {'host:1': 2.0}";
  if (PyMapping_Check(speeds.ptr()) == 0 || !py::hasattr(speeds, "items")) refuse("speeds", speeds, kWanted);
  for (const py::handle entry : py::dict(py::reinterpret_borrow<py::object>(speeds)).attr("items")()) {
    const py::tuple pair = py::reinterpret_borrow<py::tuple>(entry);
    const std::optional<double> factor = number_of(pair[1]);
    if (!factor) refuse("speeds", speeds, kWanted);
    options.speeds[index_of(balancer, pair[0])] = *factor;
  }
}

void read_added(const balance::Balancer& balancer, py::handle add, balance::WhatIfOptions& options) {
  constexpr const char* kWanted =
      "a list of pairs, each the name of a present device and how many times as fast the new one is, such as "
      "[('host:1', 1.0)]";
  const auto entries = entries_of(add);
  if (!entries) refuse("add", add, kWanted);
  for (const py::object& entry : *entries) {
    const auto pair = entries_of(entry);
    if (!pair || pair->size() != 2) refuse("add", add, kWanted);
    const std::optional<double> factor = number_of((*pair)[1]);
    if (!factor || !py::isinstance<py::str>((*pair)[0])) refuse("add", add, kWanted);
    const std::size_t like = index_of(balancer, (*pair)[0]);
    options.add.push_back({fmt::format("another {}", balancer.options().devices[like].name), like, *factor});
  }
}

void read_removed(const balance::Balancer& balancer, py::handle remove, balance::WhatIfOptions& options) {
  const auto names = entries_of(remove);
  if (!names) refuse("remove", remove, "a list of names, such as ['host:1']");
  for (const py::object& name : *names) options.remove.push_back(index_of(balancer, name));
}

std::int64_t batch_size_of(py::handle value, const std::string& unit) {
  const std::string wanted = fmt::format("a number of {} of at least 1, or None for the usual one", unit);
  if (py::isinstance<py::bool_>(value) || PyIndex_Check(value.ptr()) == 0) refuse("batch_size", value, wanted.c_str());
  const py::object whole = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  int overflow = 0;
  const long long items = whole ? PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow) : 0;
  PyErr_Clear();  // e.g. for an array of several numbers
  if (overflow != 0 || items < 1) refuse("batch_size", value, wanted.c_str());
  return items;
}

}  // namespace

balance::WhatIfOptions what_if_options(const balance::Balancer& balancer, const WhatIfSpeeds& speeds,
                                       const WhatIfAdded& add, const WhatIfRemoved& remove,
                                       const WhatIfBatchSize& batch_size) {
  balance::WhatIfOptions options;
  options.speeds.assign(balancer.options().devices.size(), 1.0);
  if (!speeds.is_none()) read_speeds(balancer, speeds, options);
  if (!add.is_none()) read_added(balancer, add, options);
  if (!remove.is_none()) read_removed(balancer, remove, options);
  if (!batch_size.is_none()) options.batch_size = batch_size_of(batch_size, balancer.options().unit);
  return options;
}

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "module_contents.hpp"

#include <cstddef>

namespace py = pybind11;

namespace paceline::python {

ModuleContents::ModuleContents(const std::vector<std::string>& names, bool objects) : objects_(objects) {
  for (const std::string& name : names) {
    names_.push_back(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name.c_str())));
  }
}

void ModuleContents::note(const py::list& modules) {
  noted_.clear();
  walk(modules, [&](const void* object) {
    noted_.push_back(object);
    return true;
  });
}

bool ModuleContents::same(const py::list& modules) const {
  std::size_t next = 0;
  const bool all = walk(modules, [&](const void* object) { return next < noted_.size() && noted_[next++] == object; });
  return all && next == noted_.size();
}

/// Calls `see` with each object until it returns false. Returns whether it never did.
template <typename See>
bool ModuleContents::walk(const py::list& modules, See&& see) const {
  for (const py::handle module : modules) {
    for (const py::str& name : names_) {
      const py::object found = module.attr(name);
      if (!PyDict_Check(found.ptr())) throw py::type_error("ModuleContents: the attribute is no dictionary");
      if (!see(found.ptr())) return false;
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(found.ptr(), &position, &key, &value) != 0) {
        if (!see(key) || (objects_ && !see(value))) return false;
      }
    }
  }
  return true;
}

}  // namespace paceline::python

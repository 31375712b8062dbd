// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace paceline::python {

/// What modules of PyTorch hold in some of their dictionaries: the dictionaries themselves, their keys and, if wanted,
/// the objects behind these. It is asked in each step, of networks with a thousand entries, so it compares addresses.
///
/// It keeps nothing alive, so that no garbage is hidden from Python. Whoever has it keeps what it has noted.
class ModuleContents {
 public:
  ModuleContents(const std::vector<std::string>& names, bool objects);

  /// Remember the present contents.
  void note(const pybind11::list& modules);
  /// Whether they are those that were noted.
  [[nodiscard]] bool same(const pybind11::list& modules) const;

 private:
  template <typename See>
  bool walk(const pybind11::list& modules, See&& see) const;

  std::vector<pybind11::str> names_;
  bool objects_;
  std::vector<const void*> noted_;
};

}  // namespace paceline::python

// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled part of paceline.";
  paceline::python::bind_errors(module);
  auto plan = module.def_submodule("plan");
  paceline::python::bind_plan(plan);
  auto balance = module.def_submodule("balance");
  paceline::python::bind_balance(balance);
  auto sim = module.def_submodule("sim");
  paceline::python::bind_sim(sim);
  auto runtime = module.def_submodule("runtime");
  paceline::python::bind_runtime(runtime);
  paceline::python::bind_health(runtime);
  auto comm = module.def_submodule("comm");
  paceline::python::bind_comm(comm);
  auto engine = module.def_submodule("engine");
  paceline::python::bind_engine(engine);
}

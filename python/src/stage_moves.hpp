// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>

namespace paceline::python {

/// Changes of what a pipeline runs, as Python sees them.
inline pybind11::list move_dicts(const std::vector<balance::StageMove>& moves) {
  constexpr std::array kKinds{"depth", "cuts", "memory", "devices"};
  pybind11::list dicts;
  for (const balance::StageMove& move : moves) {
    pybind11::dict dict;
    dict["step"] = move.step;
    dict["kind"] = kKinds.at(static_cast<std::size_t>(move.kind));
    dict["from_cuts"] = move.from_cuts;
    dict["to_cuts"] = move.to_cuts;
    dict["from_order"] = move.from_order;
    dict["to_order"] = move.to_order;
    dict["seconds_before"] = move.seconds_before;
    dict["seconds_after"] = move.seconds_after;
    dict["moved_bytes"] = move.moved_bytes;
    dict["cost_seconds"] = move.cost_seconds;
    dict["reason"] = move.reason;
    dicts.append(dict);
  }
  return dicts;
}

}  // namespace paceline::python

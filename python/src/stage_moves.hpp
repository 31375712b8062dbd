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
  using namespace pybind11::literals;
  pybind11::list dicts;
  for (const balance::StageMove& move : moves) {
    dicts.append(pybind11::dict(
        "step"_a = move.step, "kind"_a = kKinds.at(static_cast<std::size_t>(move.kind)), "from_cuts"_a = move.from_cuts,
        "to_cuts"_a = move.to_cuts, "from_order"_a = move.from_order, "to_order"_a = move.to_order,
        "seconds_before"_a = move.seconds_before, "seconds_after"_a = move.seconds_after,
        "moved_bytes"_a = move.moved_bytes, "cost_seconds"_a = move.cost_seconds, "reason"_a = move.reason));
  }
  return dicts;
}

}  // namespace paceline::python

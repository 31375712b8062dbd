// SPDX-License-Identifier: Apache-2.0
#include "move_reports.hpp"

#include <pybind11/stl.h>

#include <utility>

namespace py = pybind11;

namespace paceline::python {
namespace {

const char* name_of(balance::MoveOutcome outcome) {
  switch (outcome) {
    case balance::MoveOutcome::pending:
      return "pending";
    case balance::MoveOutcome::kept:
      return "kept";
    case balance::MoveOutcome::taken_back:
      return "taken back";
    case balance::MoveOutcome::overtaken:
      return "overtaken";
    case balance::MoveOutcome::unjudged:
      return "unjudged";
  }
  return "";
}

}  // namespace

py::list move_dicts(const std::vector<balance::MoveReport>& moves) {
  py::list dicts;
  for (const balance::MoveReport& move : moves) {
    py::dict entry;
    entry["step"] = move.step;
    entry["batch_size"] = move.batch_size;
    entry["from"] = move.from;
    entry["to"] = move.to;
    entry["promised_gain"] = move.promised_gain;
    entry["measured_gain"] = move.measured_gain;
    entry["resolution"] = move.resolution;
    entry["outcome"] = name_of(move.outcome);
    dicts.append(std::move(entry));
  }
  return dicts;
}

}  // namespace paceline::python

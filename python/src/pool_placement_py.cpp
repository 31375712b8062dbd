// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include <paceline/error.hpp>
#include <paceline/plan/pool_types.hpp>

#include "bindings.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

using Answer = std::optional<std::size_t>;

Answer fastest_idle(const plan::PoolQuestion& question) {
  const auto one = std::ranges::find(question.candidates, true, &plan::PoolCandidate::idle);
  return one == question.candidates.end() ? Answer() : Answer(one->device);
}

/// The place among the candidates that the function answers, or its text.
Answer ask(const py::object& function, const plan::PoolQuestion& question, std::string& text) {
  py::tuple candidates(question.candidates.size());
  for (std::size_t k = 0; k < question.candidates.size(); ++k) {
    const plan::PoolCandidate& one = question.candidates[k];
    candidates[k] = py::make_tuple(one.name, one.idle, one.free_in_seconds, one.seconds);
  }
  const py::object answer =
      call_python(function, question.now_seconds, question.kind_name, static_cast<int>(question.priority),
                  question.deadline_seconds, question.waiting, candidates);
  if (py::isinstance<py::str>(answer)) {
    text = answer.cast<std::string>();
    return {};
  }
  const int place = answer.cast<int>();
  return place < 0 ? Answer() : Answer(question.candidates[static_cast<std::size_t>(place)].device);
}

/// On any thread. It throws nothing of Python's.
Answer ask_anywhere(const py::object& function, const plan::PoolQuestion& question) {
  if (interpreter_is_ending()) return fastest_idle(question);
  Answer answer;
  std::string text;
  on_any_thread([&] {
    try {
      answer = ask(function, question, text);
    } catch (py::error_already_set& failed) {
      // An interrupt is no answer: it is raised again once the call that has asked is over.
      if (interrupts(failed)) {
        PyErr_SetInterrupt();
        answer = fastest_idle(question);
      } else {
        text = "an error of Python";
        failed.discard_as_unraisable("the placement of a pool");
      }
    } catch (const std::exception& failed) {
      text = failed.what();
    }
  });
  if (!text.empty()) throw Error(text);
  return answer;
}

}  // namespace

plan::PoolOptions with_placement(plan::PoolOptions options, const char* call,
                                 const std::variant<std::string, PlacementFunction>& placement, bool throws) {
  if (const auto* const name = std::get_if<std::string>(&placement)) {
    options.placement = placement_of(call, *name);
    return options;
  }
  options.placement = plan::Placement::custom;
  // Dropped on whichever thread ends the pool.
  options.choose = [function = shared(std::get<PlacementFunction>(placement)),
                    throws](const plan::PoolQuestion& question) {
    std::string text;
    return throws ? ask(*function, question, text) : ask_anywhere(*function, question);
  };
  return options;
}

}  // namespace paceline::python

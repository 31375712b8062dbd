// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include <paceline/engine/pipeline_step.hpp>

namespace paceline::python {

/// Per stage what ran: ('F' or 'B', micro-batch, start seconds, finish seconds) each.
using ActionTuple = std::tuple<char, std::int64_t, double, double>;
using ActionTuples = std::vector<std::vector<ActionTuple>>;

inline char letter_of(plan::Action::Kind kind) { return kind == plan::Action::Kind::forward ? 'F' : 'B'; }

inline std::vector<std::vector<ActionRecord>> records_of(const ActionTuples& tuples) {
  std::vector<std::vector<ActionRecord>> stages;
  for (const auto& actions : tuples) {
    auto& stage = stages.emplace_back();
    for (const auto& [letter, micro_batch, start, finish] : actions) {
      const auto kind = letter == 'F' ? plan::Action::Kind::forward : plan::Action::Kind::backward;
      stage.push_back({{.kind = kind, .micro_batch = micro_batch}, start, finish});
    }
  }
  return stages;
}

}  // namespace paceline::python

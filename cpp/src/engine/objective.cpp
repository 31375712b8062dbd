// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "engine/objective_state.hpp"

namespace paceline {

void internal::check_weight(double total_weight) {
  if (std::isfinite(total_weight) && total_weight > 0.0) return;
  throw InvalidArgument(fmt::format(
      "step: the total weight is {}; the objective is divided by it, so it must be positive and finite. Skip batches "
      "without weight.",
      total_weight));
}

Objective::Objective(double value) : state_(std::make_shared<State>(value)) {}
Objective::Objective(std::shared_ptr<State> state) : state_(std::move(state)) {}

double Objective::value() const { return state_->get(); }

}  // namespace paceline

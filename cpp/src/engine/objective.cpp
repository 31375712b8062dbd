// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "engine/objective_state.hpp"

namespace paceline {

Objective::Objective(double value) : state_(std::make_shared<State>(value)) {}
Objective::Objective(std::shared_ptr<State> state) : state_(std::move(state)) {}

double Objective::value() const { return state_->get(); }

}  // namespace paceline

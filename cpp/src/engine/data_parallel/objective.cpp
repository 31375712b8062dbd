// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/objective.hpp>

#include <mutex>
#include <optional>
#include <utility>

namespace paceline {

struct Objective::State {
  std::mutex mutex;
  std::optional<double> value;
  std::function<double()> read;
};

Objective::Objective(double value) : state_(std::make_shared<State>()) { state_->value = value; }

Objective::Objective(std::function<double()> read) : state_(std::make_shared<State>()) {
  state_->read = std::move(read);
}

double Objective::value() const {
  const std::lock_guard lock(state_->mutex);
  if (!state_->value) {
    state_->value = state_->read();
    state_->read = nullptr;  // and what it holds
  }
  return *state_->value;
}

}  // namespace paceline

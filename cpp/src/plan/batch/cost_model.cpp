// SPDX-License-Identifier: Apache-2.0

#include <cmath>

#include <paceline/plan/cost_model.hpp>

#include "plan/batch/monotone.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

void require_cost(double value, const char* what) {
  if (!std::isfinite(value) || value < 0.0)
    refuse("{} is {}; a cost in seconds must be finite and not negative", what, value);
}

}  // namespace

CostModel CostModel::affine(double fixed_seconds, double per_item_seconds) {
  require_cost(fixed_seconds, "fixed_seconds");
  require_cost(per_item_seconds, "per_item_seconds");
  CostModel model;
  model.fixed_seconds_ = fixed_seconds;
  model.per_item_seconds_ = per_item_seconds;
  return model;
}

double CostModel::seconds(std::int64_t items) const noexcept {
  return fixed_seconds_ + per_item_seconds_ * static_cast<double>(items);
}

std::int64_t CostModel::items_within(double budget_seconds, std::int64_t limit) const noexcept {
  if (limit < 0 || !(seconds(0) <= budget_seconds)) return -1;
  if (seconds(limit) <= budget_seconds) return limit;
  const std::int64_t guess = to_count((budget_seconds - fixed_seconds_) / per_item_seconds_, limit);
  return last_that_fits(0, limit, guess, [&](std::int64_t items) { return seconds(items) <= budget_seconds; });
}

CostModel CostModel::scaled(double factor) const {
  if (!std::isfinite(factor) || factor < 0.0)
    refuse("factor is {}; a model can be scaled by a finite factor that is not negative", factor);
  return affine(fixed_seconds_ * factor, per_item_seconds_ * factor);
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include <paceline/observe/history.hpp>

#include <algorithm>
#include <utility>

namespace paceline::observe {
namespace {

void add_to(std::optional<double>& sum, const std::optional<double>& next) {
  sum = sum && next ? std::optional(*sum + *next) : std::nullopt;
}

void add_to(HistoryRow& row, const HistoryRow& next) {
  row.steps += next.steps;
  row.step_seconds += next.step_seconds;
  row.longest_step_seconds = std::max(row.longest_step_seconds, next.longest_step_seconds);
  row.moves += next.moves;
  add_to(row.reduction_seconds, next.reduction_seconds);
  add_to(row.launching_seconds, next.launching_seconds);
  if (!next.reason.empty()) row.reason = next.reason;
  for (std::size_t d = 0; d < row.items.size(); ++d) {
    row.items[d] += next.items[d];
    row.busy_seconds[d] += next.busy_seconds[d];
  }
  row.blocks = next.blocks;
  if (next.planned.empty()) row.planned.clear();
  for (std::size_t d = 0; d < row.planned.size(); ++d) row.planned[d] += next.planned[d];
  if (next.costs.empty()) row.costs.clear();
  for (std::size_t d = 0; d < row.costs.size(); ++d) row.costs[d] += next.costs[d];
}

}  // namespace

History::History(std::size_t capacity) : capacity_(std::max<std::size_t>(capacity + capacity % 2, 2)) {}

void History::add(const StepSample& sample) {
  HistoryRow step;
  step.steps = 1;
  step.items = sample.items;
  step.busy_seconds = sample.busy_seconds;
  step.costs = sample.costs;
  step.planned = sample.planned;
  step.blocks = sample.blocks;
  step.step_seconds = step.longest_step_seconds = sample.step_seconds;
  step.moves = sample.moved ? 1 : 0;
  step.reduction_seconds = sample.reduction_seconds;
  step.launching_seconds = sample.launching_seconds;
  step.reason = sample.reason;

  const std::lock_guard lock(mutex_);
  step.first_step = steps_++;
  if (!rows_.empty() && rows_.back().steps < steps_per_row_) {
    add_to(rows_.back(), step);
    return;
  }
  if (rows_.size() == capacity_) merge_neighbours();
  rows_.push_back(std::move(step));
}

void History::merge_neighbours() {
  for (std::size_t i = 0; i < capacity_ / 2; ++i) {
    add_to(rows_[2 * i], rows_[2 * i + 1]);
    if (i > 0) rows_[i] = std::move(rows_[2 * i]);
  }
  rows_.resize(capacity_ / 2);
  steps_per_row_ *= 2;
}

std::vector<HistoryRow> History::snapshot() const {
  const std::lock_guard lock(mutex_);
  return rows_;
}

std::int64_t History::steps() const {
  const std::lock_guard lock(mutex_);
  return steps_;
}

}  // namespace paceline::observe

// SPDX-License-Identifier: Apache-2.0
#include "engine/step/short_pieces.hpp"

#include <algorithm>
#include <cmath>

#include <paceline/plan/cost_model.hpp>

namespace paceline::internal {
namespace {

/// How many of these items run at once, so that they end within so many seconds.
std::int64_t items_at_once(const plan::CostModel& model, double seconds, std::int64_t items) {
  const std::int64_t within = std::max<std::int64_t>(1, model.items_within(seconds, items));
  if (model.seconds(within) >= 2.0 * model.fixed_seconds()) return within;
  return std::max<std::int64_t>(1, model.items_within(2.0 * model.fixed_seconds(), items));
}

}  // namespace

std::vector<ShortPieces::Span> ShortPieces::pieces(DeviceId device, std::int64_t begin, std::int64_t end,
                                                   double seconds, std::optional<std::int64_t> most) {
  DeviceState& state = devices_[device];
  const std::int64_t items = end - begin;
  const plan::CostModel model = state.times.samples() > 0 ? state.times.model() : plan::CostModel();
  // All of the time counts per item until a second length is known.
  const bool fits = state.times.samples() > 0 && model.seconds(items) <= seconds;
  std::int64_t size = std::max<std::int64_t>(1, items / 2);
  if (state.fewest < state.largest || fits) {
    size = std::max({std::int64_t{1}, state.fewest / 2, items_at_once(model, seconds, items)});
    if (state.size > 0) size = std::min(size, 2 * state.size);  // one time that is off may not make pieces long
    if (size < items) state.size = size;
  }
  size = std::min(size, most.value_or(items));
  if (size >= items) return {{begin, end}};
  const std::int64_t count = (2 * items + size - 1) / (2 * size);  // pieces of that size; half of one is left
  std::vector<Span> pieces;
  for (std::int64_t at = begin, k = 1; at < end; ++k) {
    const std::int64_t next = k > count ? end : std::min(end, begin + 2 * k * items / (2 * count + 1));
    if (next > at) pieces.emplace_back(at, next);
    at = next;
  }
  return pieces;
}

void ShortPieces::ran(DeviceId device, std::int64_t items, double seconds) {
  DeviceState& state = devices_[device];
  state.times.add(static_cast<double>(items), seconds);
  state.fewest = state.fewest > 0 ? std::min(state.fewest, items) : items;
  state.largest = std::max(state.largest, items);
}

}  // namespace paceline::internal

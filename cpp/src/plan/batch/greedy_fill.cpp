// SPDX-License-Identifier: Apache-2.0
#include "plan/batch/greedy_fill.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "plan/numbers.hpp"

namespace paceline::plan {
namespace {

std::int64_t fill_up_to(std::span<const GrainRange> ranges, double seconds, std::span<std::int64_t> grains) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    grains[i] = std::max(ranges[i].low, ranges[i].cost.within(seconds, ranges[i].low, ranges[i].high));
    sum += grains[i];
  }
  return sum;
}

// The time by which the lines take `count` grains, if no range ends before.
double level_of_lines(std::span<const GrainRange> ranges, std::int64_t count) {
  double rates = 0.0;
  double grains = static_cast<double>(count);
  for (const GrainRange& range : ranges) {
    if (range.cost.slope() <= 0.0 || range.high == range.low) continue;
    rates += 1.0 / range.cost.slope();
    grains += 0.5 + range.cost.intercept() / range.cost.slope();  // rounding down takes half a grain from each range
  }
  return rates > 0.0 ? grains / rates : 0.0;
}

// Fills up to a level that leaves few grains to repair. Newton's method on the exact counts usually takes a few steps.
// Every other one of many steps bisects, down to adjacent doubles if needed: a flat line has many grains with one
// finish time, which the repair moves together.
std::int64_t fill_nearly(std::span<const GrainRange> ranges, std::int64_t count, std::span<std::int64_t> grains) {
  constexpr int kQuickSteps = 6;
  const std::int64_t size = std::ssize(ranges);
  double below = 0.0;
  double above = 0.0;
  for (const GrainRange& range : ranges) above = std::max(above, range.cost.seconds(range.high));
  above = std::min(above, std::numeric_limits<double>::max());
  double seconds = std::clamp(level_of_lines(ranges, count), below, above);
  for (int step = 0;; ++step) {
    const std::int64_t sum = fill_up_to(ranges, seconds, grains);
    if (std::abs(sum - count) <= (step < kQuickSteps ? size / 2 : 2 * size)) return sum;
    (sum < count ? below : above) = seconds;
    if (!(std::nextafter(below, kInfinity) < above)) return fill_up_to(ranges, above, grains);
    double rate = 0.0;  // grains per second of the ranges that a later or an earlier level moves
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const bool moves = sum < count ? grains[i] < ranges[i].high : grains[i] > ranges[i].low;
      if (moves && ranges[i].cost.slope() > 0.0) rate += 1.0 / ranges[i].cost.slope();
    }
    seconds += static_cast<double>(count - sum) / rate;
    const bool halve = step >= kQuickSteps && step % 2 == 0;
    if (halve || !(seconds > below && seconds < above)) seconds = std::midpoint(below, above);
  }
}

void give(std::span<const GrainRange> ranges, std::int64_t missing, std::span<std::int64_t> grains) {
  while (missing > 0) {
    std::size_t first = ranges.size();
    double earliest = kInfinity;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (grains[i] == ranges[i].high) continue;
      const double finish = ranges[i].cost.seconds(grains[i] + 1);
      if (first == ranges.size() || finish < earliest) {
        first = i;
        earliest = finish;
      }
    }
    const std::int64_t last = ranges[first].cost.within(earliest, grains[first] + 1, ranges[first].high);
    const std::int64_t given = std::min(missing, last - grains[first]);
    grains[first] += given;
    missing -= given;
  }
}

void take(std::span<const GrainRange> ranges, std::int64_t surplus, std::span<std::int64_t> grains) {
  while (surplus > 0) {
    std::size_t last = ranges.size();
    double latest = 0.0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (grains[i] == ranges[i].low) continue;
      const double finish = ranges[i].cost.seconds(grains[i]);
      if (last == ranges.size() || finish >= latest) {
        last = i;
        latest = finish;
      }
    }
    // The search starts at low. low - 1 means that all grains above low finish at the latest time.
    const double before = std::nextafter(latest, -kInfinity);
    const std::int64_t kept =
        std::max(ranges[last].low, ranges[last].cost.within(before, ranges[last].low, grains[last]));
    const std::int64_t taken = std::min(surplus, grains[last] - kept);
    grains[last] -= taken;
    surplus -= taken;
  }
}

}  // namespace

void fill_greedily(std::span<const GrainRange> ranges, std::int64_t count, std::span<std::int64_t> grains) {
  const std::int64_t sum = fill_nearly(ranges, count, grains);
  if (sum < count) give(ranges, count - sum, grains);
  if (sum > count) take(ranges, sum - count, grains);
}

}  // namespace paceline::plan

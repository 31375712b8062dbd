// SPDX-License-Identifier: Apache-2.0
#include "plan/batch/greedy_fill.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paceline::plan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLargest = std::numeric_limits<double>::max();

struct Level {
  double grains = 0.0;
  double slope = 0.0;  // grains per second of those ranges that the level moves
  double free = 0.0;   // how many these are
};

Level level_at(std::span<const GrainRange> ranges, double seconds) {
  Level level;
  for (const GrainRange& bounded : ranges) {
    const double low = static_cast<double>(bounded.low);
    const double high = static_cast<double>(bounded.high);
    const double above = seconds - bounded.cost.intercept();
    const double slope = bounded.cost.slope();
    if (slope <= 0.0) {
      level.grains += above >= 0.0 ? high : low;
      continue;
    }
    const double rate = 1.0 / slope;
    const double grains = above * rate;
    if (grains <= low) {
      level.grains += low;
    } else if (grains >= high) {
      level.grains += high;
    } else {
      level.grains += grains;
      level.slope += rate;
      level.free += 1.0;
    }
  }
  return level;
}

// The level of the real-valued relaxation. It is only an estimate; the repair below is exact from any level.
double affine_level(std::span<const GrainRange> ranges, std::int64_t count) {
  double rates = 0.0;
  double offsets = 0.0;
  for (const GrainRange& bounded : ranges) {
    if (bounded.cost.slope() <= 0.0 || bounded.high == bounded.low) continue;
    const double rate = 1.0 / bounded.cost.slope();
    rates += rate;
    offsets += bounded.cost.intercept() * rate;
  }
  const double wanted = static_cast<double>(count);
  double seconds = rates > 0.0 ? (wanted + offsets) / rates : 0.0;
  double below = 0.0;
  double above = kInfinity;
  for (int i = 0; i < 40; ++i) {
    const Level level = level_at(ranges, seconds);
    // Rounding down takes half a grain from each moving range on average. Aiming higher by that leaves little to
    // repair.
    const double missing = wanted + 0.5 * level.free - level.grains;
    if (std::abs(missing) <= 0.25) break;
    (missing > 0.0 ? below : above) = seconds;
    double next = level.slope > 0.0 ? seconds + missing / level.slope : kInfinity;
    if (!(next > below && next < above)) next = above < kInfinity ? below + (above - below) / 2 : 2.0 * below + 1e-9;
    if (next == seconds || !(next < kInfinity)) break;
    seconds = next;
  }
  return seconds;
}

std::int64_t fill_up_to(std::span<const GrainRange> ranges, double seconds, std::span<std::int64_t> grains) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    grains[i] = std::max(ranges[i].low, ranges[i].cost.within(seconds, ranges[i].low, ranges[i].high));
    sum += grains[i];
  }
  return sum;
}

// Narrows the level by exact counts until few grains are left to repair. It interpolates while that helps, then
// bisects, down to adjacent doubles if needed: a flat line has many grains with one finish time, which the repair moves
// together.
std::int64_t search_level(std::span<const GrainRange> ranges, std::int64_t count, std::span<std::int64_t> grains) {
  const std::int64_t tolerance = 2 * static_cast<std::int64_t>(ranges.size());
  double below = 0.0;
  double above = 0.0;
  double below_sum = 0.0;
  double above_sum = 0.0;
  for (const GrainRange& bounded : ranges) {
    above = std::max(above, bounded.cost.seconds(bounded.high));
    below_sum += static_cast<double>(bounded.low);
    above_sum += static_cast<double>(bounded.high);
  }
  above = std::min(above, kLargest);
  for (int i = 0; std::nextafter(below, kInfinity) < above; ++i) {
    double middle = below / 2 + above / 2;
    if (i % 2 == 0 && above_sum > below_sum) {
      middle = below + (above - below) * ((static_cast<double>(count) - below_sum) / (above_sum - below_sum));
    }
    if (!(middle > below && middle < above)) middle = below / 2 + above / 2;
    if (!(middle > below && middle < above)) break;
    const std::int64_t sum = fill_up_to(ranges, middle, grains);
    if (std::abs(sum - count) <= tolerance) return sum;
    (sum < count ? below : above) = middle;
    (sum < count ? below_sum : above_sum) = static_cast<double>(sum);
  }
  return fill_up_to(ranges, above, grains);
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
  const std::int64_t tolerance = 2 * static_cast<std::int64_t>(ranges.size());
  std::int64_t sum = fill_up_to(ranges, affine_level(ranges, count), grains);
  // The estimate cannot handle flat lines, nor slopes that are lost in rounding.
  if (std::abs(sum - count) > tolerance) sum = search_level(ranges, count, grains);
  if (sum < count) give(ranges, count - sum, grains);
  if (sum > count) take(ranges, sum - count, grains);
}

}  // namespace paceline::plan

// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/block_costs.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

namespace paceline::internal {
namespace {

struct Ratio {
  double value = 0.0;
  double weight = 0.0;
};

/// Half of the weight lies on each side of it.
double weighted_median(std::vector<Ratio> ratios) {
  std::ranges::sort(ratios, {}, &Ratio::value);
  double left = 0.0;
  for (const Ratio& one : ratios) left += one.weight / 2.0;
  for (const Ratio& one : ratios) {
    if ((left -= one.weight) <= 0.0) return one.value;
  }
  return ratios.back().value;
}

/// Speeds by what devices have run in common, beginning with the device that ran most.
std::vector<double> speeds_of(std::span<const BlockSample> samples, std::size_t device_count) {
  using Key = std::tuple<std::size_t, bool, std::int64_t>;
  std::vector<std::map<Key, double>> times(device_count);
  for (const BlockSample& one : samples) {
    if (one.seconds > 0.0) times[one.device][{one.block, one.backward, one.items}] = one.seconds;
  }
  std::vector<std::optional<double>> speeds(device_count);
  const auto most = std::ranges::max_element(times, {}, [](const auto& mine) { return mine.size(); });
  speeds[static_cast<std::size_t>(most - times.begin())] = 1.0;
  for (bool found = true; found;) {
    found = false;
    for (std::size_t d = 0; d < device_count; ++d) {
      if (speeds[d]) continue;
      std::vector<Ratio> ratios;
      for (std::size_t other = 0; other < device_count; ++other) {
        if (!speeds[other]) continue;
        for (const auto& [key, seconds] : times[d]) {
          const auto theirs = times[other].find(key);
          if (theirs == times[other].end()) continue;
          ratios.push_back({*speeds[other] * theirs->second / seconds, seconds});
        }
      }
      if (ratios.empty()) continue;
      speeds[d] = weighted_median(std::move(ratios));
      found = true;
    }
  }
  double sum = 0.0;
  double known = 0.0;
  for (std::size_t d = 0; d < device_count; ++d) {
    if (!speeds[d] || times[d].empty()) continue;
    sum += *speeds[d];
    known += 1.0;
  }
  std::vector<double> result;
  for (const auto& speed : speeds) result.push_back(speed && sum > 0.0 ? *speed * known / sum : 1.0);
  return result;
}

/// seconds = fixed + per_item * items, neither below 0.
void fit_line(const std::vector<std::pair<double, double>>& points, double& fixed, double& per_item) {
  if (points.empty()) return;
  const auto count = static_cast<double>(points.size());
  double x = 0.0;
  double y = 0.0;
  for (const auto& [items, seconds] : points) {
    x += items / count;
    y += seconds / count;
  }
  double xx = 0.0;
  double xy = 0.0;
  for (const auto& [items, seconds] : points) {
    xx += (items - x) * (items - x);
    xy += (items - x) * (seconds - y);
  }
  per_item = xx > 0.0 ? std::clamp(xy / xx, 0.0, y / x) : y / x;
  fixed = std::max(y - per_item * x, 0.0);  // rounding may bring it below 0
}

}  // namespace

BlockFit fit_costs(std::span<const BlockSample> samples, std::size_t device_count,
                   std::vector<plan::BlockCost>& blocks) {
  BlockFit fit{.speeds = speeds_of(samples, device_count)};
  std::vector<std::vector<std::pair<double, double>>> forward(blocks.size());
  std::vector<std::vector<std::pair<double, double>>> backward(blocks.size());
  for (const BlockSample& one : samples) {
    auto& points = one.backward ? backward[one.block] : forward[one.block];
    points.emplace_back(static_cast<double>(one.items), one.seconds * fit.speeds[one.device]);
  }
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    fit_line(forward[b], blocks[b].forward_fixed, blocks[b].forward_per_item);
    fit_line(backward[b], blocks[b].backward_fixed, blocks[b].backward_per_item);
  }
  return fit;
}

}  // namespace paceline::internal
